"""Modules of a factory as the planner for other hardware has them, beside figures of others: sums
by hand, PyTorch's counter of operations, what `prepare` foretells and the native decoder."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import outsize
from outsize.cli.main import main
from outsize.collectives.pretend import Pretend, PretendWorld
from outsize.foresight.layout import Layout
from outsize.foresight.memory import HOSTED, memory, workers
from outsize.foresight.module import most_live
from outsize.foresight.named import from_config
from outsize.foresight.planning.asked import TOKENS as TOKENS_AXIS
from outsize.foresight.planning.choose import forecast
from outsize.foresight.planning.layouts import STACK, WIDE
from outsize.foresight.planning.written import plan_of
from outsize.foresight.shape import Shape
from outsize.hardware import parse_spec
from outsize.hardware.named import catalogue
from outsize.memory import Meter
from outsize.models.adopt import find_blocks
from outsize.optim import AdamW
from outsize.plan import Plan, Precision
from outsize.plan.file import read_plan
from outsize.runtime import Job
from outsize.runtime.making import AdoptedModel, make_job
from outsize.runtime.recipe import Here, Recipe
from outsize.schedule import Kind
from outsize.schedule.pipelines.interleaved import interleaved
from outsize.simulate.forecast import compose
from outsize.simulate.nowhere import nowhere
from outsize.simulate.rehearse import rehearse
from outsize.train.prepared.batches import cut
from outsize.train.prepared.foreseen import Rehearsal, foreseen
from outsize.train.prepared.guessed import guessed
from outsize.train.prepared.making import twin_of
from outsize.train.prepared.module import unpacked, without_caches

TOKENS = 64
LLAMA = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 6,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 256,
    "tie_word_embeddings": False, "use_cache": False,
}  # fmt: skip


def llama(**more: object) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**{**LLAMA, **more}))


def mlps() -> nn.Module:
    blocks = (nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(5))
    return nn.Sequential(*blocks)


def rehearsal(precision: str) -> Rehearsal:
    """Of every block of the model."""
    model = llama()
    without_caches(model)
    given = replace(guessed(model, TOKENS), dtype=getattr(torch, precision))
    shell, blocks = twin_of(model, find_blocks(model), torch.device("meta"))
    return Rehearsal(given, shell, blocks, range(len(blocks)), Precision.named(precision))


def composed(lay: Layout, precision: str) -> tuple[int, ...]:
    """Peaks of the stages as the runtime foretells its own run of a layout."""
    whole = rehearsal(precision)
    plan, derived = plan_of(shape_of(), lay), whole.derived(lay.tensor)
    reach = whole.reach() if lay.pipeline > 1 else None
    line = Pretend(lay.pipeline, lay.pipeline - 1) if lay.pipeline > 1 else None

    def job(plan: Plan, ledger: Meter) -> Job:
        twin, blocks = twin_of(whole.model, whole.blocks, torch.device("cpu"))
        model = AdoptedModel(twin, blocks, whole.given.loss, cut, reach=reach, derived=derived)
        world = PretendWorld(plan.mesh, plan.mesh.size - 1)
        here = Here(world, ledger, nowhere(plan), line=line)
        return make_job(model, plan, Recipe(AdamW()), here)

    with unpacked(whole.given.batch):
        costs = rehearse(plan, job, whole.given.of)
    return compose(plan, costs, catalogue("H100-SXM")).peaks


@cache
def shape_of(attention: str = "sdpa", precision: str = "fp32", layers: int = 6) -> Shape:
    torch.manual_seed(0)
    model = llama(attn_implementation=attention, num_hidden_layers=layers)
    without_caches(model)
    given = guessed(model, TOKENS)
    return foreseen(model, given, 8, find_blocks(model), precision)


def layout(devices: int = 1, rows: int = 2, batch: int = 16, **more: object) -> Layout:
    return Layout(devices, rows, batch, TOKENS, STACK, sequence_parallel=False, **more)


def test_states_are_those_of_the_closed_form() -> None:
    count = sum(p.numel() for p in llama().parameters())
    shape = shape_of()
    assert memory(shape, layout()).states == {
        "weights": 2 * count, "gradients": 4 * count, "optimizer": 12 * count
    }  # fmt: skip
    cut = memory(shape, layout(8, shards=8)).states
    assert cut == {name: n * count / 8 for name, n in (("weights", 2), ("gradients", 4), ("optimizer", 12))}  # fmt: skip  # noqa: E501
    # Products of blocks are halved by two workers; embedding, head and norms are whole on both.
    inside = sum(p.numel() for n, p in llama().named_parameters() if n.endswith("proj.weight"))
    assert memory(shape, layout(2, tensor=2)).states["weights"] == 2 * (count - inside / 2)
    # Stages of a pipeline have all of it among them.
    stages = [shape.module.held(layout(3, pipeline=3), place)[0] for place in range(3)]
    assert sum(stages) == count


def test_operations_are_those_that_pytorch_counts() -> None:
    rows = 3
    model = llama(attn_implementation="eager")
    ids = torch.zeros(rows, TOKENS, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids, labels=ids).loss.backward()
    # Frequencies of rotations are a product with one inner element in fp32, which have no gradient.
    found = shape_of("eager").module.flops(layout(rows=rows, batch=rows))
    assert found == pytest.approx(counter.get_total_flops(), rel=1e-3)


@pytest.mark.parametrize(("rows", "again"), [(1, False), (8, True)])
def test_bytes_on_one_device_are_those_of_prepare(rows: int, again: bool) -> None:
    lay = replace(layout(rows=rows, batch=rows), stack=WIDE, precision="fp32")
    lay = replace(lay, recompute="full" if again else "none")
    torch.manual_seed(0)
    ids = torch.randint(0, 256, (rows, TOKENS))
    recompute = ["block"] if again else []
    job = outsize.prepare(llama(), "adamw", memory="1GiB", recompute=recompute)
    job.step({"input_ids": ids, "labels": ids})
    foretold = job.preparing.forecast
    job.close()
    assert foretold is not None
    assert memory(shape_of(), lay).tensors == foretold.peak


@pytest.mark.parametrize(
    ("devices", "batch", "more", "over"),
    [
        (1, 8, {}, 0.0),  # losses of the microbatches before stay
        (2, 16, {"shards": 2}, 1e-5),
        (2, 2, {"pipeline": 2}, 0.009),  # one microbatch: nothing else is on its way
        (4, 32, {"pipeline": 2, "tensor": 2}, 0.01),
        (3, 16, {"pipeline": 3, "recompute": "full"}, 0.035),
        (2, 16, {"pipeline": 2, "whole": 2}, 0.008),
        # By how much chunks that take turns differ from how each worker of 64 wide has them.
        (3, 24, {"pipeline": 3, "chunks": 2}, 0.05),
    ],
)
def test_bytes_of_workers_are_never_under_those_of_the_runtime(
    devices: int, batch: int, more: dict[str, object], over: float
) -> None:
    lay = layout(devices, batch=batch, **more)
    own = composed(lay, "bfloat16")
    found = [one.tensors for one in workers(shape_of(precision="bf16"), lay, HOSTED).values()]
    assert len(found) == len(own)
    for one, peak in zip(found, own, strict=True):
        assert peak <= one <= peak * (1 + over)
    assert memory(shape_of(precision="bf16"), lay, HOSTED).tensors == max(found)


def test_what_chunks_keep_is_counted_turn_by_turn() -> None:
    """Beside the list of a worker's turns."""
    for pipeline, chunks, batch in ((2, 3, 16), (3, 2, 24), (4, 2, 40)):
        lay = layout(pipeline, batch=batch, pipeline=pipeline, chunks=chunks)
        kept = [5, 3, 11][:chunks]
        made = interleaved(pipeline, lay.microbatches, chunks)
        for place in range(pipeline):
            most, live = 0, 0
            for action in made.schedule.workers[place]:
                if action.kind in (Kind.FORWARD, Kind.BACKWARD):
                    sign = 1 if action.kind is Kind.FORWARD else -1
                    live += sign * kept[action.stage // pipeline]
                    most = max(most, live)
            assert most_live(lay, place, kept, 0.0) == most


@cache
def blocks_of_widths(*widths: int) -> Shape:
    model = nn.Sequential(
        *(nn.Sequential(nn.Linear(32, n), nn.GELU(), nn.Linear(n, 32)) for n in widths)
    )
    return foreseen(model, guessed(model, TOKENS), 8, find_blocks(model), "bf16")


def test_the_fullest_worker_of_a_module_may_be_in_the_middle() -> None:
    shape, lay = blocks_of_widths(32, 512, 32), layout(3, batch=16, pipeline=3)
    every = [one.tensors for one in workers(shape, lay).values()]
    assert memory(shape, lay).tensors == every[1] == max(every)


def test_a_native_decoder_of_the_same_shape_is_planned_alike() -> None:
    """Their blocks differ in what norms and gates write; all else is one architecture."""
    sizes = {
        "hidden_size": 4096, "intermediate_size": 14336, "vocab_size": 32000,
        "num_attention_heads": 32, "num_key_value_heads": 8,
    }  # fmt: skip
    native = from_config({**LLAMA, **sizes}, "config.json")
    with torch.device("meta"):
        model = llama(**sizes)
    given = guessed(model, 4096)
    own = foreseen(model, given, 8, find_blocks(model), "bf16")
    cluster = parse_spec("8xH100-SXM")
    chains = replace(STACK, norms=False)
    for more in ({}, {"shards": 8}, {"pipeline": 2}, {"recompute": "full"}):
        lay = Layout(8, 1, 64, 4096, chains, sequence_parallel=False, **more)
        one, other = (
            forecast(shape, [lay], cluster, [memory(shape, lay)], 1 << 40)[0]
            for shape in (native, own)
        )
        states = sum(one.memory.states.values())  # without the last norm
        assert sum(other.memory.states.values()) == pytest.approx(states, rel=1e-4)
        for lane in ("matmul", "attention"):
            assert other.lanes[lane] == pytest.approx(one.lanes[lane], rel=0.02)
        assert other.seconds == pytest.approx(one.seconds, rel=0.06)
        if lay.shards == 1:  # a module's code may read what lies outside its blocks at any time
            assert other.memory.process == pytest.approx(one.memory.process, rel=0.05)


# -- what a user asks ------------------------------------------------------------------------------

CODE = """
import torch
from torch import nn
from outsize.verify import Adopted

def blocks(count=4, width=32):
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(count)))

def rows():
    return Adopted(
        blocks(), lambda step, rows: torch.zeros(rows, 32), lambda y, x: (y - x).square().sum(), len
    )

def single():
    return nn.Linear(4, 4)

def boom():
    raise RuntimeError("boom")

def needs(width):
    return blocks(width=width)

def number():
    return 3

class Values(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = blocks()

    def forward(self, x):
        return self.layers(x) if x.sum().item() > 0 else self.layers(-x)
"""


def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, *more: str) -> Result:
    (tmp_path / "their_blocks.py").write_text(CODE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "their_blocks", raising=False)
    return CliRunner().invoke(main, ["plan", f"their_blocks:{name}", "--hardware", *more])


def test_a_plan_is_chosen_and_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "plan.yaml"
    more = ("--set", "train.batch_tokens=64", "--require", "pipeline=2", "--json")
    found = asked(tmp_path, monkeypatch, "rows", "4xH100-SXM", *more, "--out", str(out))
    assert found.exit_code == 0, found.output
    best = json.loads(found.output)["plans"][0]
    assert best["mesh"] in ("data=2,pipeline=2", "pipeline=2,tensor=2")
    plan = read_plan(out)
    assert plan.model == "their_blocks:rows"
    assert plan.plan.segments == 6
    assert str(plan.plan.mesh) == best["mesh"]


@pytest.mark.parametrize(
    ("name", "more", "words"),
    [
        ("single", (), "Linear cannot be split"),
        ("boom", (), "their_blocks:boom raises RuntimeError: boom"),
        ("needs", (), "their_blocks:needs needs width; expected a factory without arguments"),
        ("number", (), "their_blocks:number gives a int; expected an nn.Module"),
        ("nothing", (), "their_blocks:nothing cannot be imported"),
        ("Values", (), "Values cannot be rehearsed"),
        ("rows", ("--set", "train.sequence=32"), "train.sequence is 32, and a row of Sequential"),
        ("rows", ("--require", f"{TOKENS_AXIS}=2"), "sees whole sequences"),
    ],
)
def test_what_cannot_be_planned_is_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, more: tuple[str, ...], words: str
) -> None:
    found = asked(tmp_path, monkeypatch, name, "2xH100-SXM", *more)
    assert found.exit_code == 2
    assert words in found.output
    assert len(found.output.strip().splitlines()) == 1
