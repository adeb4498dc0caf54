"""What carries out the actions of a job: one file for each family of kinds (runtime/engine.py)."""
