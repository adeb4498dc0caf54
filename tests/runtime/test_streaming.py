"""Streamed steps equal resident ones bit for bit: losses, norms, evaluations, weights, states.

An evaluation after the first step and the last of three: one step follows an evaluation, one a
step; of two, where other modules, optimizers and sizes are told apart. Tiny chunks are cut into
many parts and tiny activations spilled (streamed.small), so that every way of moving bytes is
taken.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import plain
import pytest
import streamed
import torch
from streamed import ALL, PIECE, data_of, job_of, memory, model_of, plan_of, resting, trained
from subjects import MIXED, ROWS
from verifying import case_of

from outsize.collectives import Mesh
from outsize.errors import OutsizeError
from outsize.memory.store import MemoryStore
from outsize.models.adopt import find_blocks
from outsize.optim import SGD, AdamW
from outsize.plan import Plan, Precision, Rest, Sharding, Stage, Stream
from outsize.plan.plan import per_segment
from outsize.runtime import AdoptedFlow, Job
from outsize.verify import verify

sys.path.append(str(Path(__file__).parents[1] / "train"))
import test_prepare as modules

from outsize.runtime.recipe import Here, Recipe

DATA = data_of()
RUN, SHORT = DATA[:3], DATA[:2]
BELOW = {"parameters": "disk", "gradients": "disk", "optimizer": "disk"}
HOST = {"gradients": "host", "optimizer": "host"}


def parts(**changes) -> Stream:
    """How states stream, in small parts; made within a test."""
    return Stream(part=PIECE, **changes)


RESTS = {
    "parameters": {"parameters": "disk"},
    "gradients": {"gradients": "disk"},
    "optimizer": {"optimizer": "disk"},
    "activations": {"activations": "disk"},
    "all": ALL,
    "on host": dict.fromkeys(ALL, "host"),
    "on both": {**HOST, "parameters": "disk", "activations": "disk"},
}
# name: changes of the plan, and of the stream
RUNS = {
    "microbatches": ({}, {}),
    "layers": ({"order": "layer"}, {}),
    "behind": ({"update": "behind", "order": "layer"}, {}),
    "behind, microbatches": ({"update": "behind", "microbatch_rows": 2}, {}),
    "blocks again": ({"stages": per_segment(5, ("block",)), "order": "layer"}, {}),
    "parts again": (
        {"stages": per_segment(5, ("attention", "mlp"))},
        dict(resident=3, returned=2),
    ),
    "split, uneven": (
        {"split_backward": True, "microbatch_rows": 2, "stages": MIXED},
        dict(resident=1),
    ),
    "one stage": ({"stages": (Stage(0, 5),), "microbatch_rows": 3}, {}),
}
BRANCHES = {  # of a stream, with everything below
    "resident 1": dict(resident=1),
    "returned 3": dict(resident=5, returned=3),
    "lru": dict(policy="lru", resident=3),
    "static": dict(policy="static", resident=4, returned=2),
    "host 2": dict(host=2),
    "host 4, 3 over": dict(host=4, over=3, resident=3),
}


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    streamed.small(monkeypatch)


@pytest.fixture(scope="module")
def twins():
    """Resident runs, each made once."""
    return {}


def twin(twins, key, make, data=RUN):
    key = key, len(data)
    if key not in twins:
        twins[key] = trained(make(), data, ROWS)
    return twins[key]


def check(job: Job, expected, data=RUN) -> None:
    assert expected.differences(trained(job, data, ROWS)) == []


# Every run with all states below, in turns on one tier and on both; each state alone, and all on
# the host, with two runs.
PAIRS = [
    (run, rest)
    for i, run in enumerate(RUNS)
    for j, rest in enumerate(RESTS)
    if (rest == ("all", "on both")[i % 2] if rest in ("all", "on both") else (i + j) % 4 == 0)
]


@pytest.mark.parametrize(("run", "rest"), PAIRS)
def test_streamed_is_resident_bit_for_bit(run, rest, twins):
    changes, stream = RUNS[run]
    clip = None if "update" in changes else 0.5
    with memory() as stores:
        plan = plan_of(**changes)
        expected = twin(twins, run, lambda: job_of(plan, clip=clip))
        below = replace(resting(plan, **RESTS[rest]), stream=parts(**stream))
        job = job_of(below, stores, clip=clip)
        check(job, expected)
        read = any(store.bytes_read for store in stores.values())
        assert read or job.placement.pool or run == "one stage", "something must be below"


@pytest.mark.parametrize("branch", BRANCHES)
def test_every_way_of_passing_through_the_pool(branch, twins):
    plan = plan_of(order="layer")
    expected = twin(twins, "layers", lambda: job_of(plan))
    rest = {**ALL, **HOST, "parameters": "host"} if "host" in branch else ALL
    with memory() as stores:
        job = job_of(replace(resting(plan, **rest), stream=parts(**BRANCHES[branch])), stores)
        lanes = {action.lane.value for action in job.schedule.workers[0]}
        assert ("host" in lanes) is ("host" in branch)
        check(job, expected)


@pytest.mark.parametrize(
    ("share", "policy"),
    [(1.0, "belady"), (1.6, "belady"), (20.0, "belady"), (1.6, "lru"), (3.0, "static")],
)
def test_pools_larger_than_the_least(share, policy, twins):
    plan = plan_of()
    expected = twin(twins, "microbatches", lambda: job_of(plan), SHORT)
    with memory() as stores, memory() as others:
        least = job_of(replace(resting(plan, **BELOW), stream=parts()), others).placement.pool
        stream = parts(pool=int(least * share), policy=policy)
        job = job_of(replace(resting(plan, **BELOW), stream=stream), stores)
        assert job.placement.pool <= int(least * share)
        check(job, expected, SHORT)


def test_a_graded_choice_by_stage(twins):
    """Every stage rests elsewhere, and of one only its feed-forward's activations leave."""
    plan = plan_of(order="layer")
    expected = twin(twins, "layers", lambda: job_of(plan))
    rests = [
        Rest("disk", "host", "host", "disk"), Rest(), Rest("host", "disk", "device", "host"),
        Rest(activations="disk"), Rest("device", "device", "disk"),
    ]  # fmt: skip
    stages = [replace(s, rest=r) for s, r in zip(plan.stages, rests, strict=True)]
    stages[3] = replace(stages[3], spill=("mlp",))
    with memory() as stores:
        stream = parts(resident=3, host=2)
        check(job_of(replace(plan, stages=tuple(stages), stream=stream), stores), expected)


@pytest.mark.parametrize(
    ("family", "order"), [("gpt2", "layer"), ("deepseek_v3", "layer"), ("llama", "microbatch")]
)
def test_families(family, order, twins):
    """Tied embeddings, experts, biases, parameters held in float32; bfloat16 in one of the two."""
    named = "bfloat16" if order == "layer" else "float32"
    plan = plan_of(named, order=order, stages=per_segment(5, ("block",)))
    expected = twin(twins, (family, order), lambda: job_of(plan, family=family), SHORT)
    with memory() as stores:
        job = job_of(replace(resting(plan, **ALL), stream=parts()), stores, family=family)
        check(job, expected, SHORT)


@pytest.mark.parametrize(("optimizer", "update"), [(SGD(), "behind"), (SGD(momentum=0.9), "apart")])
def test_optimizers_with_fewer_states(optimizer, update, twins):
    plan = plan_of("bfloat16" if optimizer.states else "float32", update=update)
    clip = 0.5 if update == "apart" else None
    expected = trained(job_of(plan, clip=clip, optimizer=optimizer), SHORT, ROWS)
    with memory() as stores:
        below = replace(resting(plan, **ALL), stream=parts())
        check(job_of(below, stores, clip=clip, optimizer=optimizer), expected, SHORT)


def _adapters(name, parameter):
    return parameter.ndim > 1 or not name.startswith("blocks")


FROZEN = {
    "first stages": lambda name, _: name.startswith(("prologue", "blocks.0")),
    "a stage in the middle": lambda name, _: name.startswith("blocks.1"),
    "all but small parts": _adapters,
    "the head": lambda name, _: name.startswith("epilogue"),
}


@pytest.mark.parametrize(
    ("frozen", "rest"), list(zip(FROZEN, ("all", "parameters", "all", "all"), strict=True))
)
def test_frozen_bases(frozen, rest):
    plan = plan_of(order="layer")
    made = lambda: model_of("llama, untied", frozen=FROZEN[frozen])  # noqa: E731
    expected = trained(job_of(plan, model=made()), SHORT, ROWS)
    with memory() as stores:
        below = replace(resting(plan, **RESTS[rest]), stream=parts())
        check(job_of(below, stores, model=made()), expected, SHORT)


def test_frozen_bases_are_never_written():
    """Small trainable parts stay on the device; the base is read forward and back."""
    plan = resting(plan_of(order="layer"), parameters="disk")
    with memory() as stores:
        job = job_of(plan, stores, model=model_of("llama, untied", frozen=_adapters))
        written, base = stores["disk"].bytes_written, stores["disk"]._counts._taken
        job.step(DATA[0], 1e-2)
        first = base and stores["disk"].bytes_read
        job.step(DATA[1], 1e-2)
        assert stores["disk"].bytes_written == written
        small = {c.table.segment for c in job.chunks if c.table.trainable}
        assert small == {1, 2, 3}
        assert all((i, "parameters") not in job.weight_pool.homes.known
                   for i, c in enumerate(job.chunks) if c.table.trainable)  # fmt: skip
        assert stores["disk"].bytes_read - first <= 2 * base


# -- float64, against the plain loop --------------------------------------------------------------


@pytest.mark.parametrize(("family", "order"), [("llama", "microbatch"), ("mixtral", "layer")])
def test_float64_equals_the_plain_loop(family, order):
    model = model_of(family, "float64")
    losses, norms, expected = plain.train(model, SHORT, [1e-2] * len(SHORT), 0.5, 0.1)
    plan = replace(resting(plan_of("float64", order=order), **ALL), stream=parts())
    with memory() as stores:
        got = trained(job_of(plan, stores, model=model), SHORT, ROWS)
    assert got.losses == pytest.approx(losses, rel=1e-10)
    assert got.norms == pytest.approx(norms, rel=1e-10)
    for name, parameter in expected.named_parameters():
        far = (got.weights[name] - parameter.detach()).abs().max() / parameter.detach().abs().max()
        assert float(far) <= 1e-10, name


# -- adopted modules -------------------------------------------------------------------------------


def adopted(name: str, stages, rest: dict[str, str], stores, **changes) -> Job:
    torch.manual_seed(3)
    model = modules.WithTarget(modules.CASES[name][0]()).double()
    blocks = find_blocks(model, None)
    cut = stages(len(blocks) + 2)
    cut = tuple(replace(stage, rest=Rest(**rest)) for stage in cut)
    plan = Plan(
        len(blocks) + 2, cut, 4, 4, 0, Precision.named("float64"), stream=parts(), **changes
    )
    flow = AdoptedFlow(model, blocks, plan, modules.cross_entropy)
    clip = 0.7 if plan.update == "apart" else None
    return Job(flow, plan, Recipe(AdamW(weight_decay=0.05), clip), Here(stores=stores))


def adopted_run(name: str, job: Job):
    torch.manual_seed(5)  # dropout draws the same numbers
    data = [modules.CASES[name][1](seed) for seed in range(len(SHORT))]
    found = trained(job, data, 4)
    buffers = {n: b.clone() for n, b in job.flow.model.named_buffers()}
    return replace(found, weights=found.weights | buffers)


@pytest.mark.parametrize("turn", range(3))
@pytest.mark.parametrize("name", modules.CASES)
def test_adopted_modules(name, turn):
    """Shared inputs, glue that uses what is outside the blocks, dropout, running statistics. Each
    module under each plan and with each way to rest, each plan with each way to rest."""
    names = list(modules.CASES)
    rest = ("activations", "all", "on both")[(turn + names.index(name)) % 3]
    stages, changes = (
        (per_segment, {}),
        (lambda n: per_segment(n, ("block",)), {"order": "layer"}),
        (lambda n: (Stage(0, 1), Stage(1, 3), Stage(3, n)), {"update": "behind"}),
    )[turn]
    expected = adopted_run(name, adopted(name, stages, {}, {}, **changes))
    with memory() as stores:
        got = adopted_run(name, adopted(name, stages, RESTS[rest], stores, **changes))
    assert expected.differences(got) == []


# -- states ----------------------------------------------------------------------------------------


def test_states_are_loaded_where_they_rest():
    """A job whose states are all below goes on from what another one wrote."""
    plan = plan_of("bfloat16", order="layer")
    below = replace(resting(plan, **ALL), stream=parts())
    with memory() as stores, memory() as others:
        one, other = job_of(plan), job_of(below, stores, model=model_of("llama, untied"))
        for batch in DATA[:2]:
            one.step(batch, 1e-2)
        weights, states = streamed.snapshot(one)
        other.step(DATA[3], 1e-2)  # what it was does not matter
        other.load(
            lambda name, out: out.copy_(weights[name]), lambda name, out: out.copy_(states[name])
        )
        other.restore_counts(one.update_counts())
        third = job_of(below, others)
        third.load(*(lambda n, out, s=s: out.copy_(s[n]) for s in streamed.snapshot(other)))
        third.restore_counts(other.update_counts())
        for job in (other, third):
            found = streamed.snapshot(job)
            assert all(torch.equal(found[0][n], weights[n]) for n in weights)
            assert all(torch.equal(found[1][n], states[n]) for n in states)
        expected = trained(one, DATA[2:], ROWS)
        for job in (other, third):
            assert expected.differences(trained(job, DATA[2:], ROWS)) == []


def test_weights_by_name_are_read_once_in_the_order_of_the_model():
    with memory() as stores:
        job = job_of(resting(plan_of(), **BELOW), stores)
        job.step(DATA[0], 1e-2)
        expected = {name: w.clone() for name, w in job.weights()}
        before = stores["disk"].bytes_read
        read = job.weight_reader()
        got = {name: read(name) for name in expected}
        assert all(torch.equal(got[name], expected[name]) for name in expected)
        whole = sum(4 * chunk.table.numel for chunk in job.chunks)
        assert stores["disk"].bytes_read - before == whole


def test_an_evaluation_that_fails_leaves_nothing_to_rely_on(twins):
    """The pool holds what the evaluation brought: the next step must fetch its own."""
    plan = plan_of(order="layer")
    expected = twin(twins, "layers", lambda: job_of(plan))
    with memory() as stores:
        job = job_of(replace(resting(plan, **ALL), stream=parts()), stores)
        block = job.flow.blocks[2]
        plainly = block.forward

        def broken(*args):
            raise RuntimeError("broken")

        block.forward = broken
        with pytest.raises(RuntimeError, match="broken"):
            job.evaluate(DATA[0], ROWS)
        block.forward = plainly
        check(job, expected)


def test_what_cannot_be_is_refused():
    plan = resting(plan_of(), parameters="dsk")
    with memory() as stores, pytest.raises(OutsizeError, match="tier 'dsk'; did you mean 'disk'"):
        job_of(plan, stores)
    both = replace(plan_of(update="behind"), stream=parts(host=2))
    with pytest.raises(
        OutsizeError, match=r"'behind' and stream.host is 2; expected update 'apart'"
    ):
        job_of(both, clip=None)
    with pytest.raises(OutsizeError, match="short of"):
        job_of(replace(resting(plan_of(), **BELOW), stream=parts(pool=4096)),
               {"disk": MemoryStore("disk", 1 << 24)})  # fmt: skip


SHARED = {
    "parts, and some blocks": {"stages": MIXED},
    "in chunks": {"stages": per_segment(5, ("block",)), "sequence_chunk": 7},
}


@pytest.mark.parametrize("name", SHARED)
def test_shares_below_are_computed_again(name):
    """Two workers' shares of everything and their activations, in memory below."""
    changes = dict(SHARED[name])
    rest = Rest("host", "host", "host", "host")
    changes["stages"] = tuple(replace(stage, rest=rest) for stage in changes["stages"])
    case = case_of(
        clip=0.5, rows=5, microbatch_rows=2, mesh=Mesh(2), shards=Sharding(2, 2, 2), **changes
    )
    assert verify(case).holds
