"""Generation by the engine, also with weights that pass through a pool."""
