"""Tensor parallelism derived for models of blocks that declare nothing."""
