"""Chunks: parameters, gradients, master and states are views of flat buffers without padding."""

from __future__ import annotations

from math import prod

import pytest
import torch
from torch import nn

from outsize.memory import Ledger, tables
from outsize.memory.chunk import Dtypes
from outsize.optim.declared import WHOLE, StateSpec
from outsize.plan import Plan
from outsize.plan.plan import per_segment
from outsize.runtime.storage.weight_pool import WeightPool
from outsize.schedule.chunks import Chunks
from outsize.schedule.items import Items
from outsize.schedule.kept import Kept
from outsize.schedule.layout import Placement

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
    weight_pool = residence_of(found, MIXED, ())
    index = found.index(wide)
    fill(weight_pool, made)
    assert weight_pool.chunks[index].parameters.dtype == torch.float32
    assert torch.equal(wide.slots[0].of(weight_pool.chunks[index].parameters), before), (
        "not rounded"
    )


def residence_of(layout, dtypes, states, account=None) -> WeightPool:
    """The chunks of two segments, all of it on the device."""
    plan = Plan(2, per_segment(2))
    kept = Kept(dtypes, tuple(map(StateSpec, states)))
    placement = Placement(Items(Chunks(plan, layout, ((0,), (1, 0)), kept)))
    weight_pool = WeightPool(placement, {}, torch.device("cpu"), account or Ledger().kind)
    for index in range(len(layout)):
        weight_pool.make(index)
    return weight_pool


def fill(weight_pool: WeightPool, made) -> None:
    """Give the chunks the parameters' values, as a job does."""
    for index, chunk in enumerate(weight_pool.chunks):
        held = dict(weight_pool.placement.chunks.held(index))
        whats = tuple(w for w in ("master", "parameters") if w in held)
        for what, flat in weight_pool.staged(index, whats).items():
            for slot in chunk.table.slots:
                slot.of(flat).copy_(made[slot.name].detach())
            weight_pool.write(index, what, flat)


@pytest.mark.parametrize("dtypes", [FP32, MIXED])
def test_states_of_a_chunk_are_views_of_flat_buffers(dtypes):
    made, segments, group_of = parameters()
    layout = tables(segments, group_of)
    weight_pool = residence_of(layout, dtypes, ("one", "two"))
    fill(weight_pool, made)
    chunk = weight_pool.chunks[0]
    weights = chunk.parameters if chunk.master is None else chunk.master
    for slot in chunk.table.slots:
        value = slot.of(chunk.parameters)
        assert torch.equal(value, made[slot.name].detach().to(dtypes.parameters))
        assert torch.equal(slot.of(weights), made[slot.name].detach()), "the master is not rounded"
        start = chunk.parameters.data_ptr() + slot.offset * chunk.parameters.element_size()
        assert value.data_ptr() == start
        slot.of(chunk.optimizer["one"]).fill_(3.0)
        assert (chunk.optimizer["one"][slot.offset : slot.offset + slot.numel] == 3.0).all()
        assert not chunk.optimizer["two"].any() and not chunk.gradients.any()
    assert (chunk.master is None) is (dtypes.master is None)
    assert weight_pool.read(0, "one") is chunk.optimizer["one"], "the buffer itself"


def test_bytes_follow_from_the_shapes_alone():
    _, segments, group_of = parameters()
    ledger = Ledger()
    with ledger:
        weight_pool = residence_of(tables(segments, group_of), MIXED, ("m", "v"), ledger.kind)
    trained, frozen = 15 + 3 + 35 + 1 + 4, 4 + 6
    assert len(weight_pool.chunks) == 4
    assert {k: v for k, v in ledger.live.items() if v} == {
        "parameters": 2 * (trained + frozen), "gradients": 4 * trained, "master": 4 * trained,
        "optimizer": 8 * trained,
    }  # fmt: skip


def test_frozen_weights_may_be_cut_where_an_optimizer_updates_whole_ones():
    """Else one worker of the data axis has all of a frozen matrix, and the others none."""
    _, segments, group_of = parameters()
    layout = tables(segments, group_of, grains=(WHOLE, WHOLE))
    assert {table.trainable: table.grain for table in layout} == {True: WHOLE, False: 1}


def test_frozen_chunks_have_nothing_but_parameters():
    made, segments, group_of = parameters()
    layout = tables(segments, group_of)
    weight_pool = residence_of(layout, MIXED, ("m",))
    fill(weight_pool, made)
    frozen = next(c for c in weight_pool.chunks if not c.table.trainable)
    assert frozen.gradients is None and frozen.master is None and not frozen.optimizer
