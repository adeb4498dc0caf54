"""How a claim is printed: what the paper claims, what was measured here, under which conditions."""

from __future__ import annotations

import platform
import sys

import torch


def graded(paper: str, claimed: str, measured: str, conditions: str, weaker: str = "") -> None:
    """Print a claim and leave the process. weaker: "x of y" where the paper's own figure was not
    reached, else nothing. Exit code 0 for `reached`, 3 for `weaker`."""
    word = f"weaker ({weaker})" if weaker else "reached"
    _print(paper, claimed, measured, conditions, word)
    sys.exit(3 if weaker else 0)


def verdict(paper: str, claimed: str, measured: str, holds: bool, conditions: str) -> None:
    """Print a claim and leave the process: 0 where the effect is there, 1 where it is not."""
    _print(paper, claimed, measured, conditions, "holds" if holds else "DOES NOT HOLD")
    sys.exit(0 if holds else 1)


def _print(paper: str, claimed: str, measured: str, conditions: str, word: str) -> None:
    machine = f"{platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}"
    print(f"paper      {paper}")
    print(f"claimed    {claimed}")
    print(f"measured   {measured}")
    print(f"conditions {conditions}; {machine}")
    print(f"verdict    {word}")
