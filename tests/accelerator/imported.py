"""What processes of these tests import anyway, once for all of them. Nothing here computes: threads
that are there before a fork are not there after it."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

HERE = Path(__file__).parent
# First: other tests have put folders on the path in which modules have the same names.
sys.path[:0] = [str(HERE), str(HERE.parent / "support")]

for _name in (
    "torch._decomp", "torch._meta_registrations", "torch._refs", "outsize.train.prepare", "cases",
):  # fmt: skip
    import_module(_name)
