"""Chunks: parameters, gradients, master and states are views of flat buffers without padding."""

from __future__ import annotations

from math import prod

import pytest
import torch
from torch import nn

from outsize.memory import Ledger, tables
from outsize.memory.chunk import Dtypes, adopt

FP32 = Dtypes(torch.float32, torch.float32, None, torch.float32)
MIXED = Dtypes(torch.bfloat16, torch.float32, torch.float32, torch.float32)


def parameters():
    """Two segments with a shared parameter, a frozen one, and settings by rank."""
    torch.manual_seed(0)
    made = {
        "a.weight": nn.Parameter(torch.randn(3, 5)),
        "a.bias": nn.Parameter(torch.randn(3)),
        "a.large": nn.Parameter(torch.randn(7, 5)),
        "a.scale": nn.Parameter(torch.randn(())),
        "a.frozen": nn.Parameter(torch.randn(4), requires_grad=False),
        "b.weight": nn.Parameter(torch.randn(2, 2)),
        "b.correction": nn.Parameter(torch.randn(6), requires_grad=False),
    }
    first = [(n, p) for n, p in made.items() if n.startswith("a.")]
    second = [("b.tied", made["a.large"]), *((n, p) for n, p in made.items() if n[0] == "b")]
    group_of = {n: int(p.ndim < 2) for n, p in made.items()} | {"b.tied": 0}
    return made, [first, second], group_of


def test_tables_cover_every_parameter_once_without_padding():
    made, segments, group_of = parameters()
    found = tables(segments, group_of)
    assert sorted(s.name for t in found for s in t.slots) == sorted(made), "the tied one once"
    for table in found:
        offset = 0
        for slot in table.slots:
            assert slot.offset == offset and slot.numel == prod(slot.shape)
            assert slot.shape == tuple(made[slot.name].shape)
            offset += slot.numel
        assert table.numel == offset
        groups = [slot.group for slot in table.slots]
        assert groups == sorted(groups), "decayed ones first, so that ranges are few"
    assert [(t.segment, t.trainable, t.numel) for t in found] == [
        (0, True, 15 + 3 + 35 + 1), (0, False, 4), (1, True, 4), (1, False, 6),
    ]  # fmt: skip


def test_wide_parameters_have_a_chunk_of_their_own():
    made, segments, group_of = parameters()
    found = tables(segments, group_of, wide={"b.correction"})
    (wide,) = [t for t in found if t.wide]
    assert [s.name for s in wide.slots] == ["b.correction"]
    before = made["b.correction"].detach().clone()
    chunk = adopt(wide, made, MIXED, (), Ledger().kind)
    assert chunk.parameters.dtype == torch.float32
    assert torch.equal(made["b.correction"], before), "not rounded to bfloat16"


@pytest.mark.parametrize("dtypes", [FP32, MIXED])
def test_adopted_parameters_are_views_with_the_same_values(dtypes):
    made, segments, group_of = parameters()
    before = {n: p.detach().clone() for n, p in made.items()}
    table = tables(segments, group_of)[0]
    chunk = adopt(table, made, dtypes, ("one", "two"), Ledger().kind)
    for slot, views in chunk.views():
        parameter = made[slot.name]
        assert torch.equal(parameter, before[slot.name].to(dtypes.parameters))
        assert torch.equal(views["weights"], before[slot.name]), "the master is not rounded"
        start = chunk.parameters.data_ptr() + slot.offset * chunk.parameters.element_size()
        assert parameter.data_ptr() == start
        chunk.parameters[slot.offset] = 5.0
        assert parameter.flatten()[0] == 5.0
        views["one"].fill_(3.0)
        assert (chunk.optimizer["one"][slot.offset : slot.offset + slot.numel] == 3.0).all()
        assert not chunk.optimizer["two"].any() and not chunk.gradients.any()
    assert (chunk.master is None) is (dtypes.master is None)


def test_publish_rounds_the_master_to_the_nearest_even():
    made, segments, group_of = parameters()
    chunk = adopt(tables(segments, group_of)[0], made, MIXED, (), Ledger().kind)
    half = 2.0**-8  # of one: bfloat16 has 8 bits, so 1 + half lies between two of its numbers
    chunk.master[:4] = torch.tensor([1 + half, 1 + 3 * half, 1 + half * 1.01, 1 - half / 4])
    chunk.publish()
    assert chunk.parameters[:4].tolist() == [1.0, 1 + 4 * half, 1 + 2 * half, 1.0]
    assert torch.equal(chunk.parameters, chunk.master.bfloat16())
    assert made["a.large"].flatten()[0] == chunk.parameters[0]


def test_bytes_follow_from_the_shapes_alone():
    made, segments, group_of = parameters()
    ledger = Ledger()
    with ledger:
        chunks = [
            adopt(t, made, MIXED, ("m", "v"), ledger.kind) for t in tables(segments, group_of)
        ]
    trained, frozen = 15 + 3 + 35 + 1 + 4, 4 + 6
    assert len(chunks) == 4
    assert {k: v for k, v in ledger.live.items() if v} == {
        "parameters": 2 * (trained + frozen), "gradients": 4 * trained, "master": 4 * trained,
        "optimizer": 8 * trained,
    }  # fmt: skip


def test_frozen_chunks_have_nothing_but_parameters():
    made, segments, group_of = parameters()
    frozen = next(t for t in tables(segments, group_of) if not t.trainable)
    chunk = adopt(frozen, made, MIXED, ("m",), Ledger().kind)
    assert chunk.gradients is None and chunk.master is None and not chunk.optimizer
    chunk.publish()
    assert chunk.weights is chunk.parameters
