"""Outsize trains, fine-tunes and serves models that are larger than the hardware at hand.

model = outsize.load(path)                        # any Hugging Face decoder directory
outsize.generate(model, "def fib(n):")
job = outsize.prepare(model, optimizer="adamw")   # or any nn.Module made of blocks
loss = job.step(batch)
outsize.save(model, path)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from outsize.errors import OutsizeError

if TYPE_CHECKING:
    from outsize.api import generate, load, prepare, save

__version__ = "0.1.0"
__all__ = ["OutsizeError", "__version__", "generate", "load", "prepare", "save"]


def __getattr__(name: str) -> Any:
    """The functions come with PyTorch, which takes a second: they are imported when first used."""
    if name in ("generate", "load", "prepare", "save"):
        from outsize import api

        return getattr(api, name)
    raise AttributeError(f"module 'outsize' has no attribute {name!r}")
