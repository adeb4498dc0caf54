"""Outsize trains, fine-tunes and serves models that are larger than the hardware at hand.

model = outsize.load(path)                        # any Hugging Face decoder directory
outsize.generate(model, "def fib(n):")
with outsize.engine(path) as engine:              # many at once, each as if it were alone
    engine.generate(["def fib(n):", "import "])
job = outsize.prepare(model, optimizer="adamw")   # or any nn.Module made of blocks
loss = job.step(batch)
outsize.save(model, path)
plan = outsize.plan("small", memory="2GiB")       # what prepare(plan=...) and train --plan take
outsize.simulate("small", plan)                   # a step of it, predicted
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from outsize.errors import OutsizeError
from outsize.lazy import importing

if TYPE_CHECKING:
    from outsize.api import adapt, engine, generate, load, merge, remove_adapter, save
    from outsize.decode.samplers import Sampling
    from outsize.hardware import Hardware
    from outsize.plan import Plan
    from outsize.schedule.program import Program
    from outsize.serve.model import Model
    from outsize.techniques.callbacks import Callback
    from outsize.trace.trace import Trace
    from outsize.train.planned import plan, simulate
    from outsize.train.prepare import prepare
    from outsize.train.prepared.task import Task

__version__ = "0.1.0"
__all__ = [
    "Callback",
    "Hardware",
    "Model",
    "OutsizeError",
    "Plan",
    "Program",
    "Sampling",
    "Task",
    "Trace",
    "__version__",
    "adapt",
    "engine",
    "generate",
    "load",
    "merge",
    "plan",
    "prepare",
    "remove_adapter",
    "save",
    "simulate",
]


# They come with PyTorch, which takes a second. `plan` and `simulate` are packages that are called.
__getattr__ = importing(__name__, ("plan", "simulate"))
