"""The bytes of a job's states: where they lie, how they travel, how they are updated."""
