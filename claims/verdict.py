"""How a claim is printed: what the paper claims, what was measured here, under which conditions."""

from __future__ import annotations

import platform
import sys

import torch


def verdict(paper: str, claimed: str, measured: str, holds: bool, conditions: str) -> None:
    """Print a claim and leave the process: 0 where the effect is there, 1 where it is not."""
    machine = f"{platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}"
    print(f"paper      {paper}")
    print(f"claimed    {claimed}")
    print(f"measured   {measured}")
    print(f"conditions {conditions}; {machine}")
    print(f"verdict    {'holds' if holds else 'DOES NOT HOLD'}")
    sys.exit(0 if holds else 1)
