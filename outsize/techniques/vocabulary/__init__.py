"""Vocabulary parallelism: the input and output layers cut over all workers of a pipeline.

Yeung et al., "Balancing Pipeline Parallelism with Vocabulary Parallelism", 2024.
"""
