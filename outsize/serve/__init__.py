"""Generation on several workers: each has a part of the model's weights."""

from outsize.serve.meshed import Meshed, check_mesh

__all__ = ["Meshed", "check_mesh"]
