"""Autocast in a module's own forward: its blocks compute under it whenever they run, and nothing
else does."""

from __future__ import annotations

import pytest
import torch
from casting import Noting, assert_alike, plain, prepared, same

PLANS = {
    "plain": {},
    "blocks again": {"recompute": ("block",)},
    "parts again": {"recompute": ("1", "3")},
    "microbatches": {"microbatches": 2},
    "layer by layer": {"microbatches": 2, "memory": "24KiB", "host_memory": "2MiB"},
}
CPU = torch.device("cpu")


@pytest.mark.parametrize("name", PLANS)
def test_blocks_compute_as_their_module_says(name: str) -> None:
    options = PLANS[name]
    Noting.seen.clear()
    found = prepared(CPU, **options)
    assert Noting.seen == {torch.bfloat16}
    assert not torch.is_autocast_enabled("cpu") and torch.is_autocast_cache_enabled()
    microbatches = options.get("microbatches", 1)
    assert_alike(found, plain(CPU, microbatches))
    assert same(found, prepared(CPU, microbatches=microbatches))
