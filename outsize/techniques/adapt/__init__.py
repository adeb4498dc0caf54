"""Parameter-efficient fine-tuning: adapters of a frozen model."""
