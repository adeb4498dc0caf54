"""Messages of few bits: the code beside a loop over numbers, training beside the same maths in
plain PyTorch, bytes beside what was counted, and what is refused."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from piped import numbers
from plain import batches
from streamed import model_of, plan_of
from subjects import SEQUENCE, VOCAB
from threads import play
from torch.func import functional_call
from torch.nn import functional as F

from outsize.collectives import Mesh, received
from outsize.collectives.hierarchical import Hierarchical
from outsize.errors import OutsizeError
from outsize.models.cuts import NO_CUTS
from outsize.optim import AdamW
from outsize.plan import Precision, Sharding, zero
from outsize.plan.approximate import check_axes
from outsize.runtime import Job, NativeFlow
from outsize.runtime.recipe import Here, Recipe
from outsize.schedule.kept import GRADIENTS, MASTER, PARAMETERS
from outsize.techniques import quantised_messages
from outsize.techniques.quantised_messages import AS_IT_IS, BLOCK, NAME, Blocks, Coded

STEPS = 2


def rounded(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Block by block, number by number: scales are float32, numbers whole, ties go to the even."""
    most, made = 2 ** (bits - 1) - 1, []
    values = x.tolist()
    for first in range(0, len(values), BLOCK):
        block = values[first : first + BLOCK]
        largest = max(map(abs, block))
        scale = float(torch.tensor(largest / most, dtype=torch.float32))
        made += [round(v * (most / largest)) * scale if largest else 0.0 for v in block]
    return torch.tensor(made, dtype=x.dtype)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("numel", [0, 1, BLOCK - 1, BLOCK, 3 * BLOCK + 37])
def test_a_message_is_blocks_of_whole_numbers(bits, numel):
    x = torch.randn(numel, dtype=torch.float64, generator=torch.Generator().manual_seed(numel))
    x[BLOCK : 2 * BLOCK] = 0
    code = Blocks(bits)
    message = torch.empty(code.bytes(numel), dtype=torch.uint8)
    assert len(message) == 4 * (math.ceil(numel / BLOCK) + math.ceil(numel * bits / 8 / 4))
    code.write(x, message)
    out = torch.full_like(x, 7)
    code.read(message, out)
    assert torch.equal(out, rounded(x, bits))
    code.read(message, out, add=True)
    assert torch.equal(out, 2 * rounded(x, bits))


def test_what_is_not_finite_stays_so():
    """Who adds gradients must see it."""
    x = torch.ones(2 * BLOCK)
    for bad in (math.nan, math.inf):
        x[3] = bad
        message, out = torch.empty(Blocks(8).bytes(len(x)), dtype=torch.uint8), x.clone()
        Blocks(8).write(x, message)
        Blocks(8).read(message, out)
        assert not out[:BLOCK].isfinite().any() and torch.equal(out[BLOCK:], x[BLOCK:])


def test_groups_of_any_spans_in_any_pieces(monkeypatch):
    """Uneven and empty spans; pieces of one block."""
    monkeypatch.setattr(quantised_messages, "_PIECE", 3 * BLOCK)
    spans = [(0, 300), (300, 300), (300, 1000)]
    whole = torch.randn(3, 1000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def work(world):
        group = Coded(world.group((0, 1, 2)), Blocks(8))
        first, last = spans[world.rank]
        gathered = torch.zeros(1000, dtype=torch.float64)
        group.all_gather(whole[0, first:last].clone(), spans, gathered)
        total = torch.zeros(last - first, dtype=torch.float64)
        group.reduce_scatter(whole[world.rank].clone(), spans, total)
        return gathered, total, received(world)

    wanted = torch.cat([rounded(whole[0, a:b], 8) for a, b in spans])
    for rank, (gathered, total, had) in enumerate(play(Mesh(3), work)):
        assert torch.equal(gathered, wanted)
        a, b = spans[rank]
        parts = [x[a:b] if r == rank else rounded(x[a:b], 8) for r, x in enumerate(whole)]
        assert torch.equal(total, sum(parts, torch.zeros(b - a, dtype=torch.float64)))
        sizes = [Blocks(8).bytes(last - first) for first, last in spans]
        assert had == {
            name: size
            for name, size in (
                ("all_gather", sum(sizes) - sizes[rank]),
                ("all_to_all", 2 * sizes[rank]),
            )
            if size
        }


def test_sums_over_hosts_are_rounded_once_a_level():
    """Two hosts of two workers: first to the worker of this host that goes on with a part."""
    spans, hosts = [(0, 200), (200, 400), (400, 600), (600, 800)], ((0, 1), (2, 3))
    whole = torch.randn(4, 800, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def work(world):
        inner = world.group(hosts[world.rank // 2])
        outer = world.group((world.rank % 2, world.rank % 2 + 2))
        levels = Hierarchical(world.rank, hosts, inner, outer, lambda: inner)
        first, last = spans[world.rank]
        out = torch.zeros(last - first, dtype=torch.float64)
        Blocks(4).over(levels, "reduce").reduce_scatter(whole[world.rank].clone(), spans, out)
        return out

    def part(worker, place):
        """What a worker has of the spans of the workers of a place, one behind the other."""
        return torch.cat([whole[worker, slice(*spans[host[place]])] for host in hosts])

    for rank, found in enumerate(play(Mesh(4), work)):
        host, place = divmod(rank, 2)
        sums = [part(own[place], place) + rounded(part(own[1 - place], place), 4) for own in hosts]
        mine, theirs = (sums[h].view(2, 200)[host] for h in (host, 1 - host))
        torch.testing.assert_close(found, mine + rounded(theirs, 4), rtol=1e-12, atol=1e-12)


def job_of(world, plan):
    model = model_of("llama, untied", plan.precision.compute)
    recipe, here = Recipe(AdamW(weight_decay=0.1), None), Here(world)
    return Job(NativeFlow(model, plan), plan, recipe, here, cuts=NO_CUTS)


def plain(chunks, data, plan, bits):
    """The same in plain PyTorch: losses, and weights by name. bits: of parameters, of gradients."""
    model = model_of("llama, untied", "float64")
    named = dict(model.named_parameters())
    groups = [
        {"params": [p for p in named.values() if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in named.values() if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95))

    def by_shares(what, values, way):
        """Values by name, changed share by share of their chunks."""
        made = {}
        for index, table in enumerate(chunks.tables):
            flat = torch.cat([values[slot.name].reshape(-1) for slot in table.slots])
            for place in range(plan.mesh.data):
                span = slice(*chunks.share(index, what, place))
                flat[span] = way(flat[span], place)
            for slot in table.slots:
                part = flat[slot.offset : slot.offset + slot.numel]
                made[slot.name] = part.view(slot.shape)
        return made

    losses = []
    for batch in data:
        now = {name: p.detach().clone() for name, p in named.items()}
        if bits[0] < AS_IT_IS:
            now = by_shares(PARAMETERS, now, lambda part, _: rounded(part, bits[0]))
        loss, count, sums = 0.0, int((batch.targets_BS != -100).sum()), dict.fromkeys(named, 0)
        for worker in range(plan.mesh.data):
            leaves = {name: p.clone().requires_grad_() for name, p in now.items()}
            here = sum_of(model, leaves, batch.rows(*plan.rows_at(worker))) / count
            found = torch.autograd.grad(here, list(leaves.values()))
            gradients = dict(zip(leaves, found, strict=True))
            if bits[1] < AS_IT_IS:
                gradients = by_shares(
                    GRADIENTS, gradients,
                    lambda part, to, me=worker: part if to == me else rounded(part, bits[1]),
                )  # fmt: skip
            sums = {name: sums[name] + g for name, g in gradients.items()}
            loss += float(here.detach())
        for name, p in named.items():
            p.grad = sums[name]
        optimizer.step()
        losses.append(loss)
    return losses, {name: p.detach() for name, p in named.items()}


def sum_of(model, leaves, batch):
    """The sum of a batch's losses, of a copy of the model with other weights."""

    class Loss(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = copy.deepcopy(model)

        def forward(self):
            context = self.model.context(batch.positions().reshape(-1), batch.flat_bounds())
            hidden = self.model.hidden(batch.ids_BS.reshape(-1), context)
            logits, targets = self.model.epilogue.logits(hidden), batch.targets_BS.reshape(-1)
            return F.cross_entropy(logits, targets, ignore_index=-100, reduction="sum")

    return functional_call(Loss(), {f"model.{name}": leaf for name, leaf in leaves.items()})


@pytest.mark.parametrize("bits", [(8, 32), (32, 4), (4, 8)])
def test_training_is_the_same_maths_written_out(bits):
    plan = plan_of(
        "float64", mesh=Mesh(2), shards=zero(3, 2), rows=5, microbatch_rows=3,
        approximate=(NAME,), gather_bits=bits[0], reduce_bits=bits[1],
    )  # fmt: skip
    data = batches(STEPS, plan.rows, SEQUENCE, VOCAB)

    def work(world):
        job = job_of(world, plan)
        says = job.program.voices[world.rank].says(job.program.worker(world.rank))
        job.step(data[0].rows(*plan.rows_at(world.rank)), 0.0)
        had = received(world, "network")
        job.close()
        job = job_of(world, plan)
        result, chunks = numbers(job, plan, data), job.placement.chunks
        job.close()
        return result, chunks, says, had

    every = play(plan.mesh, work)
    losses, weights = plain(every[0][1], data, plan, bits)
    for (found, held, _), *_ in every:
        assert [step[0] for step in found[:STEPS]] == pytest.approx(losses, rel=1e-10)
        for name, weight in weights.items():
            torch.testing.assert_close(held[name], weight, rtol=1e-10, atol=1e-10)
    talks = [
        t for *_, says, _ in every for action in says for t in action if t.channel == "network"
    ]
    assert sum(t.received for t in talks) == sum(sum(had.values()) for *_, had in every)


@pytest.mark.parametrize("bits", [{}, {"gather_bits": AS_IT_IS, "collect_bits": 4}])
def test_levels_and_a_master_copy(bits):
    """Parameters within pairs, gradients within pairs and then between them, as Frontier's. What
    was updated elsewhere comes rounded; the master copy does not change for it."""
    wide = Precision("float64", "float64", "float64", "float64")
    plan = plan_of(
        "float64", mesh=Mesh(4), shards=Sharding(2, 2, 4), rows=4, precision=wide,
        approximate=(NAME,), **bits,
    )  # fmt: skip
    data = batches(1, plan.rows, SEQUENCE, VOCAB)

    def work(world):
        job = job_of(world, plan)
        says = job.program.voices[world.rank].says(job.program.worker(world.rank))
        job.step(data[0].rows(*plan.rows_at(world.rank)), 1e-2)
        job.close()
        held = [chunk.shards[PARAMETERS].clone() for chunk in job.chunks]
        masters = [chunk.master.clone() for chunk in job.chunks]
        return says, received(world, "network"), held, masters, job.placement.chunks

    every = play(plan.mesh, work)
    talks = [t for says, *_ in every for action in says for t in action if t.channel == "network"]
    assert {(t.operation, len(t.ranks)) for t in talks if t.memory} == {
        ("all_gather", 2), ("reduce_scatter", 2)
    }  # fmt: skip
    coded = [t.operation for t in talks if t.memory].count("all_gather")
    whole = [t.operation for t in talks if not t.memory].count("all_gather")
    assert coded and bool(whole) == bool(bits)  # collected, and gathered within pairs
    assert sum(t.received for t in talks) == sum(sum(had.values()) for _, had, *_ in every)
    *_, chunks = every[0]
    for rank, (_, _, held, _, _) in enumerate(every):
        for index, here in enumerate(held):
            base, _ = chunks.share(index, PARAMETERS, rank)
            for place, (_, _, _, masters, _) in enumerate(every):
                first, last = chunks.share(index, MASTER, place)
                if place % 2 == rank % 2:
                    there = here[first - base : last - base]
                    assert torch.equal(there, rounded(masters[index], bits.get("collect_bits", 8)))


def test_what_does_nothing_or_is_not_named_is_refused():
    def said(**changes):
        with pytest.raises(OutsizeError) as caught:
            plan_of("float32", **({"mesh": Mesh(2), "rows": 2, "shards": zero(3, 2)} | changes))
        return str(caught.value)

    named = {"approximate": (NAME,)}
    assert "gather_bits is 8, but plan.approximate does not hold" in said(gather_bits=8)
    assert "reduce_bits is 5, expected 4, 8 or 32; such as 4" in said(reduce_bits=5, **named)
    whole = {"shards": zero(2, 2), "gather_bits": 8}
    assert "nothing would be done: no state is cut that they bring; set plan.zero to 3" in said(
        **whole, **named
    )
    assert "collect_bits is 8, and nothing would be done" in said(collect_bits=8, **named)
    assert "states that are whole on every worker" in said(shards=Sharding(), **named)
    with pytest.raises(OutsizeError, match=r"but mesh\.data is 1 and nothing would be done"):
        check_axes((NAME,), Mesh(1, 2))
