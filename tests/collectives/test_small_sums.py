"""All-reduces of few bytes (claims/small.py, for claims/nvrar.py), over queues of this process."""

from __future__ import annotations

import sys
from collections import defaultdict
from pathlib import Path
from queue import SimpleQueue

import pytest
import torch
from threads import play

from outsize.collectives import Mesh
from outsize.collectives.collective import Handle
from outsize.errors import OutsizeError

sys.path.append(str(Path(__file__).parents[2] / "claims"))
from small import ALGORITHMS, Chosen, Row, Table


class Posts:
    """A group whose messages are what they are when they are sent."""

    def __init__(self, rank, size, boxes, early) -> None:
        self.rank, self.size, self.boxes, self.early = rank, size, boxes, early
        self.received = defaultdict(int)

    def post(self, name, sent, had) -> Handle:
        for peer, tensor in sent:
            self.boxes[self.rank, peer].put(tensor.clone())

        def come() -> None:
            for peer, tensor in had:
                tensor.copy_(self.boxes[peer, self.rank].get())

        return Handle(come)


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("size", [2, 3, 4, 6, 8])
@pytest.mark.parametrize("name", ["doubling", "star"])
def test_sums_are_those_of_all_workers(name, size, early) -> None:
    boxes = {(a, b): SimpleQueue() for a in range(size) for b in range(size)}
    generator = torch.Generator().manual_seed(0)
    parts = torch.randn(size, 7, generator=generator)

    def work(world):
        group = Posts(world.rank, size, boxes, early)
        mine = parts[world.rank].clone()
        ALGORITHMS[name](group, mine, "sum")
        return mine, group.received["all_reduce"]

    found = play(Mesh(size), work)
    torch.testing.assert_close(found[0][0], parts.sum(0), rtol=1e-6, atol=1e-6)
    assert all(torch.equal(mine, found[0][0]) for mine, _ in found), "the same bits"
    one, beyond = 7 * 4, size - (1 << size.bit_length() - 1)
    rounds = (size - beyond) * (size.bit_length() - 1)
    messages = 2 * (size - 1) if name == "star" else rounds + 2 * beyond
    assert sum(had for _, had in found) == messages * one


def test_a_table_takes_what_is_quickest_for_so_many_bytes() -> None:
    rows = (Row("ring", 0, 3.0), Row("ring", 100, 4.0), Row("star", 0, 1.0), Row("star", 100, 9.0))
    table = Table(4, rows)
    assert table.seconds("star", 50) == 5.0 and table.seconds("ring", 200) == 5.0
    assert [table.best(count) for count in (0, 25, 30, 1000)] == ["star", "star", "ring", "ring"]
    with pytest.raises(OutsizeError, match="among 4 workers for a group of 2"):
        Chosen(Posts(0, 2, {}, True), table)
