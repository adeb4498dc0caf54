"""What processes of tests import anyway, once for all of them. Nothing here computes: threads that
are there before a fork are not there after it."""

from __future__ import annotations

import gc
import sys
from importlib import import_module
from pathlib import Path

SUPPORT = Path(__file__).resolve().parent
# First: other tests have put folders on the path in which modules have the same names.
sys.path[:0] = [str(SUPPORT.parent / "accelerator"), str(SUPPORT)]

for _name in (
    "torch.distributed", "torch._decomp", "torch._dynamo", "torch._meta_registrations",
    "torch._refs", "outsize.cli.main", "outsize.serve", "outsize.train.prepare",
    "outsize.train.run", "outsize.train.workers", "cases",
    "transformers.models.gpt2.modeling_gpt2", "transformers.models.llama.modeling_llama",
):  # fmt: skip
    import_module(_name)

gc.freeze()  # what is imported lives as long as the server and whom it forks
gc.set_threshold(50_000, 20, 100)
