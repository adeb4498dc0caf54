"""Training cases of the accelerator's tests: small jobs, alike on the CPU and on the device."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from math import isfinite
from pathlib import Path
from typing import Any
from unittest.mock import patch

import strict
import torch
from streamed import ALL, Outcome, data_of, resting, snapshot
from subjects import MIXED, ROWS, base_plan, config_of

from outsize.decode.samplers import Sampling
from outsize.memory import store as stores_module
from outsize.memory.disk import DiskStore
from outsize.memory.store import MemoryStore
from outsize.models.build import adapt, build
from outsize.models.decoder import Decoder
from outsize.models.dropout import Noise
from outsize.models.families import parse
from outsize.optim import AdamW, Muon
from outsize.optim.optimizer import Optimizer
from outsize.plan import Local, Plan, Precision, Stream
from outsize.plan import plan as plan_module
from outsize.plan.plan import per_segment
from outsize.runtime import Job
from outsize.runtime import spill as spill_module
from outsize.runtime.making import NativeModel, make_job
from outsize.runtime.method import method_of
from outsize.runtime.recipe import Here, Recipe
from outsize.techniques.adapt.lora import Lora
from outsize.techniques.optim.adamw8bit import NAME as EIGHT
from outsize.techniques.optim.adamw8bit import AdamW8Bit, Settings

CPU = torch.device("cpu")
LR = 1e-2
PIECE = 1 << 9  # elements of a part of what streams: tiny chunks are cut as large ones are
TIER = 1 << 22  # bytes: the device fills what is page-locked when it is taken and let go
UNPINNED = "copy of unpinned memory"
Waited = Mapping[tuple[str, str], int]  # as strict.waits counts
PROMPTS, NEW = ((5, 17, 2, 44, 9), (3,)), 3
GATED = {
    "model_type": "gla", "vocab_size": 53, "hidden_size": 24, "intermediate_size": 40,
    "num_hidden_layers": 3, "num_heads": 4, "expand_k": 0.5, "expand_v": 1, "hidden_act": "swish",
    "norm_eps": 1e-2, "initializer_range": 0.2,
}  # fmt: skip


def some(index: int, least: int = 2) -> tuple[tuple[str, int, int], ...]:
    """Orders of streams for the case of a number: `demand`, and others such that all of them come
    up in nineteen cases. OUTSIZE_ORDERS=all gives all twenty."""
    if os.environ.get("OUTSIZE_ORDERS") == "all":
        return strict.ORDERS
    others = (strict.ORDERS[1 + (index + 7 * i) % 19] for i in range(least - 1))
    return strict.ORDERS[0], *others


def device() -> torch.device:
    """That of the tests, once it is there."""
    return torch.device("strict", 0)


@dataclass(frozen=True)
class Case:
    """A plan over a small decoder. changes: of the plan. rest, stream: where its states rest, and
    how they stream. alike: the operators are the CPU's own, and so must be every bit; elsewhere
    the CPU has a kernel of its own. generates: tokens, between two steps. disk: its tier "disk" is
    one, and not memory."""

    changes: Mapping[str, Any] = field(default_factory=dict)
    rest: Mapping[str, str] = field(default_factory=dict)
    stream: Mapping[str, Any] = field(default_factory=dict)
    family: str = "gemma2"
    precision: str = "float64"
    optimizer: Optimizer = field(default_factory=lambda: AdamW(weight_decay=0.1))
    adapter: Lora | None = None
    dropout: float = 0.0
    alike: bool = True
    generates: bool = False
    disk: bool = False

    def plan(self) -> Plan:
        plan = base_plan("float64", **self.changes)
        plan = replace(plan, precision=Precision.named(self.precision))
        if not self.rest:
            return plan
        part = {} if self.disk else {"part": 4 * PIECE}
        return replace(resting(plan, **self.rest), stream=Stream(**part, **self.stream))

    def model(self, device: torch.device) -> Decoder:
        wide = torch.float64 if self.precision == "float64" else torch.float32
        config = parse(GATED) if self.family == "gla" else config_of(self.family)
        model = build(config, seed=1, dtype=wide, device=device)
        return model if self.adapter is None else adapt(model, self.adapter, seed=2)

    def job(self, device: torch.device, stores: Mapping[str, Any]) -> Job:
        plan = self.plan()
        clip = None if plan.update == "behind" else 0.5
        recipe = method_of(plan.approximate).recipe(Recipe(self.optimizer, clip))
        return make_job(NativeModel(self.model(device)), plan, recipe, Here(stores=stores))

    @property
    def steps(self) -> int:
        """Three where tokens come between two steps, where a step is skipped, of methods that look
        at what steps gave, and of streamed updates behind passes, for which the second waits."""
        methods = self.generates or self.precision == "float16" or "approximate" in self.changes
        return 3 if methods or (self.rest and "update" in self.changes) else 2

    def batches(self, steps: int | None = None) -> list[Any]:
        data = data_of(steps or self.steps)
        if not self.dropout:
            return data
        return [replace(b, noise=Noise(self.dropout, 1, step)) for step, b in enumerate(data)]


LAYERS = {"order": "layer"}
HOST, STATES = dict.fromkeys(ALL, "host"), {"gradients": "host", "optimizer": "host"}
CASES = {
    "one microbatch": Case({"microbatch_rows": 3}, generates=True),
    "several microbatches": Case(),
    "parts again": Case({"stages": per_segment(5, ("mlp", "attention"))}),
    "uneven microbatches by layer, blocks again, tiles, chunks": Case(
        {
            **LAYERS, "microbatch_rows": 2, "stages": per_segment(5, ("block",)), "mlp_tile": 6,
            "loss_chunk": 7,
        }
    ),
    "tiles and chunks, split": Case(
        {"mlp_tile": 6, "loss_chunk": 7, "split_backward": True, "stages": MIXED}
    ),
    "dropout": Case(
        {"stages": per_segment(5, ("block",))}, family="llama", dropout=0.2, alike=False
    ),
    "updates behind": Case({"update": "behind"}),
    "states on host": Case(LAYERS, STATES, generates=True),
    "updated on host": Case(LAYERS, {**ALL, **STATES, "parameters": "host"}, {"host": 2}),
    "updated on host, weights not": Case(LAYERS, STATES, {"host": 2}),
    "all on host": Case({}, HOST, generates=True),
    "all on host, layers": Case({"order": "layer", "microbatch_rows": 2}, HOST),
    "all on disk": Case(LAYERS, ALL, disk=True, generates=True),
    "in parts": Case(LAYERS, ALL, {"resident": 3, "returned": 2}),
    "updates behind, on host": Case({"update": "behind", "order": "layer"}, HOST),
    "activations on host": Case({}, {"activations": "host"}),
    "activations on disk": Case({}, {"activations": "disk"}, disk=True),
    "freezing": Case(
        {"approximate": ("frozen-by-dynamics",)}, family="llama, untied", alike=False
    ),
    "zeroth-order": Case({"approximate": ("zeroth-order",)}),
    "local learning": Case(
        {"approximate": ("local-learning",), "local": Local(2, "momentum", 0.9)},
        family="llama, untied", alike=False,
    ),
    "8-bit AdamW": Case(
        {"approximate": (EIGHT,)}, optimizer=AdamW8Bit(settings=Settings(least=512)),
    ),
    "muon": Case(optimizer=Muon()),
    "LoRA": Case(adapter=Lora(3, 5.0), family="llama", alike=False, generates=True),
    "gated linear attention": Case(family="gla", alike=False, generates=True),
    "experts": Case(family="mixtral", alike=False),
    "latent attention": Case(family="deepseek_v3", alike=False, generates=True),
    "windows": Case(family="mistral", alike=False, generates=True),
    "gpt2": Case(family="gpt2", alike=False),
    "float32": Case(precision="float32", alike=False),
    "bfloat16": Case(precision="bfloat16", alike=False),
    "bfloat16 on host": Case(LAYERS, HOST, precision="bfloat16", alike=False),
    "float16 on host": Case(LAYERS, STATES, precision="float16", alike=False),  # two overflows
}  # fmt: skip


@contextmanager
def stores_of(case: Case, device: torch.device, folder: Path) -> Iterator[dict[str, Any]]:
    """Two tiers, their memory pinned where the device is none of the host's. Tiny activations spill
    and tiny chunks are cut, in this process."""
    pinned = device.type != "cpu"
    block = stores_module.BLOCK if case.disk else 2 * PIECE  # of two bytes an element at least
    with (
        patch.object(spill_module, "LEAST", 64),
        patch.object(plan_module, "PART", PIECE),
        patch.object(stores_module, "BLOCK", block),  # sums are made on a disk
        ExitStack() as stack,
    ):
        disk = DiskStore("disk", [folder], TIER) if case.disk else MemoryStore("disk", TIER, pinned)
        made = {"host": MemoryStore("host", TIER, pinned), "disk": disk}
        for each in made.values():
            stack.callback(each.close)
        yield made


@dataclass
class Waits:
    """How often the computing thread waits for the device: in a step, where, and in an
    evaluation that begins with what it needs there. unpinned: copies of such memory, in any thread,
    until then."""

    stepping: int = 0
    lines: tuple[str, ...] = ()
    evaluating: int = 0
    unpinned: int = 0


def outcome(case: Case, device: torch.device, folder: Path, waits: Waits | None = None) -> Outcome:
    """Losses, norms, what was found between the steps, weights and states after the last. waits:
    is told of them."""
    with (
        strict.waits() as counted,
        stores_of(case, device, folder) as stores,
        closing(case.job(device, stores)) as job,
    ):
        losses, norms, between = [], [], []
        counted_step = 1 if case.generates else case.steps - 1  # tokens come before the third
        for step, batch in enumerate(case.batches()):
            with strict.waits(mine=True) as stepping:
                loss = job.step(batch, LR)
            losses.append(float(loss))
            norms.append(job.report.norm if isfinite(job.report.norm) else 0.0)  # it is skipped
            if step == 0:
                between.append(job.evaluate(data_of(1)[0], ROWS))
            if waits is not None and step == counted_step:
                _tell(waits, job, stepping, counted)
            if step == 1 and case.generates:
                between += told(job)
        weights, states = snapshot(job)
        return Outcome(losses, norms, between, on_host(weights), on_host(states))


def _tell(waits: Waits, job: Job, stepping: Waited, counted: Waited) -> None:
    """stepping: of the step. counted: of all so far, and from here on."""
    for _ in range(2):  # where weights stream, the first brings those that a list begins with
        with strict.waits(mine=True) as evaluating:
            job.evaluate(data_of(1)[0], ROWS)
    waits.stepping, waits.evaluating = sum(stepping.values()), sum(evaluating.values())
    waits.lines = tuple(f"{n} x {kind} at {at}" for (kind, at), n in stepping.items())
    waits.unpinned = sum(n for (kind, _), n in counted.items() if kind == UNPINNED)


def told(job: Any) -> list[Any]:
    """Tokens and their log-probabilities, as they are drawn from the weights now."""
    sampling = (Sampling(), Sampling(0.9, 20, 0.9, seed=1))
    found = job.generate(PROMPTS, NEW, sampling, logprobs=True)
    return [part for one in found for part in (list(one.tokens), list(one.logprobs or ()))]


def on_host(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copies there."""
    return {name: tensor.cpu() for name, tensor in tensors.items()}


def far(found: Outcome, expected: Outcome) -> float:
    """The largest difference of anything, as a part of the largest value of its kind."""
    pairs: list[tuple[Any, Any]] = [
        (found.losses, expected.losses),
        (found.norms, expected.norms),
        *zip(found.evaluations, expected.evaluations, strict=True),
        *((found.weights[name], expected.weights[name]) for name in expected.weights),
        *((found.states[name], expected.states[name]) for name in expected.states),
    ]
    return max(_apart(*(torch.as_tensor(x).double() for x in pair)) for pair in pairs)


def _apart(x: torch.Tensor, y: torch.Tensor) -> float:
    assert x.shape == y.shape
    largest = float(y.abs().max()) or 1.0
    apart = (x - y).abs().nan_to_num(nan=torch.inf).max()
    return float(apart) / max(largest, 1e-3)
