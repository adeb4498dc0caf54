"""All-reduces of few bytes between hosts, over queues of this process, and the tables of them."""

from __future__ import annotations

import json
from collections import defaultdict
from queue import SimpleQueue

import pytest
import torch
from clocks import Ticks
from threads import play

from outsize.collectives import Mesh
from outsize.collectives.collective import Handle
from outsize.collectives.small import ALGORITHMS
from outsize.collectives.tables import SIZES, Chosen, Row, Table, table_of
from outsize.errors import OutsizeError


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
    assert [table.best(count) for count in (0, 25, 30, 100)] == ["star", "star", "ring", "ring"]
    quicker = Table(4, (*rows[:2], Row("star", 0, 1.0), Row("star", 100, 2.0)))
    assert [quicker.best(count) for count in (100, 101)] == ["star", "ring"], "none was measured"
    with pytest.raises(OutsizeError, match="among 4 workers for a group of 2"):
        Chosen(Posts(0, 2, {}, True), table)


class Ring(Posts):
    """The same with the transport's own operations, which the tables compare with."""

    def all_reduce(self, flat, operation="sum"):
        ALGORITHMS["star"](self, flat, operation)
        return flat

    def broadcast(self, flat, source=0):
        others = [peer for peer in range(self.size) if peer != source]
        sent = [(peer, flat) for peer in others] if self.rank == source else []
        self.post("broadcast", sent, [] if sent else [(source, flat)]).wait()
        return flat

    def barrier(self) -> None:
        """Messages wait for whoever takes them."""


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outsize.collectives.tables.time", Ticks(0.25))


def tables(cache, hosts=("a", "b", "c")):
    boxes = {(a, b): SimpleQueue() for a in range(3) for b in range(3)}

    def work(world):
        return table_of(Ring(world.rank, 3, boxes, True), hosts, cache / str(world.rank))

    return play(Mesh(3), work)


def test_a_table_is_kept_by_the_first_and_taken_by_all(tmp_path) -> None:
    first, *others = tables(tmp_path)
    assert all(table == first for table in others) and len(first.rows) == 3 * len(SIZES)
    (kept,) = tmp_path.rglob("sums-*.json")
    assert kept.parent.name == "0" and json.loads(kept.read_text())["hosts"] == ["a", "b", "c"]
    data = json.loads(kept.read_text())
    data["seconds"] |= {f"star {size}": 0.0 for size in SIZES}
    kept.write_text(json.dumps(data))
    assert all(table.best(1 << 20) == "star" for table in tables(tmp_path)), "it is not measured"


def test_a_table_of_another_machine_and_a_damaged_one_are_measured_again(tmp_path) -> None:
    tables(tmp_path)
    (kept,) = tmp_path.rglob("sums-*.json")
    data = json.loads(kept.read_text())
    other = {cell: 1e9 for cell in data["seconds"]}
    for text in (json.dumps({"hosts": ["a", "b", "d"], "seconds": other}), "{", "[]"):
        kept.write_text(text)
        assert all(row.seconds == 0.25 for table in tables(tmp_path) for row in table.rows)
        assert json.loads(kept.read_text())["hosts"] == ["a", "b", "c"]
    tables(tmp_path, ("a", "b", "d"))
    assert len(list(tmp_path.rglob("sums-*.json"))) == 2
