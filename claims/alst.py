"""Claim: tiled loss and MLP, and checkpoints off the device, hold sequences 16 times longer on it.

Bekman et al., "Arctic Long Sequence Training", 2025: Llama 8B on one H100 from 32K to 500K tokens
by a loss and an MLP in tiles and activation checkpoints in host memory, weights and optimizer off
the device. Here blocks and epilogue run in chunks of the sequence too (Luo et al., "StreamBP",
2025), all in one plan. Lengths are those whose predicted peak, states included, fits the device:
for a small model, whose ends are then run under a ledger that raises above the budget, and for the
shape of Llama 8B with its states in host memory. The paper's baseline is the Hugging Face class
with its own loss and its own checkpointing; here too, counted on tensors without bytes, its states
taken to cost nothing. Beside it, like for like, our own block recompute with all logits at once and
with logits in chunks. That the combination is exact is shown in float64 against a plain loop that
keeps everything, and bit for bit against itself on the device.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace

import tiered
import torch
import transformers
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from verdict import Figure, conclude

from outsize.data import Batch
from outsize.hardware import Hardware, Tier, catalogue
from outsize.memory import Ledger
from outsize.memory.store import Store
from outsize.memory.tiers import TierSpec, open_stores
from outsize.models.build import build
from outsize.models.config import DecoderConfig
from outsize.models.decoder import Decoder
from outsize.models.families import parse
from outsize.optim import AdamW
from outsize.plan import Plan, Precision, Rest, Stage
from outsize.plan.settings import NONE
from outsize.runtime import Job, NativeFlow
from outsize.runtime.recipe import Here, Recipe
from outsize.search import PlanRequest, choose, native_makers
from outsize.search.request import facts_of_model
from outsize.simulate import Forecast
from outsize.simulate.costs import Facts
from outsize.simulate.forecast import compose
from outsize.simulate.rehearse import rehearse
from outsize.simulate.sample import expand, sample

MIB, GIB = 2**20, 2**30
PAPER = 500_000  # tokens of Llama 8B on one H100
BASELINE = 32_000
CLAIMED = PAPER / BASELINE


@dataclass(frozen=True)
class Rung:
    """What is switched on."""

    name: str
    loss: bool = False
    mlp: bool = False
    chunks: bool = False
    off: bool = False


LADDER = (
    Rung("block recompute"),
    Rung("+ loss in tiles", True),
    Rung("+ MLP in tiles", True, True),
    Rung("+ layers in chunks", True, True, True),
    Rung("+ checkpoints in host memory", True, True, True, True),
)


@dataclass(frozen=True)
class Subject:
    """A model and its device. tile, chunk: tokens; step: to which lengths are found; states: the
    tier of parameters, gradients and optimizer."""

    config: DecoderConfig
    precision: str
    budget: int
    tile: int
    chunk: int
    step: int
    states: str


def shape(**sizes: int) -> DecoderConfig:
    return parse({"model_type": "llama", "tie_word_embeddings": False, **sizes})


SMALL = Subject(
    shape(
        vocab_size=8192, hidden_size=128, intermediate_size=384, num_hidden_layers=12,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=1 << 17,
    ), "float32", 120 * MIB, 128, 512, 128, "device",
)  # fmt: skip
SIZES = {
    "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 1 << 22,
    "tie_word_embeddings": False,
}  # fmt: skip
LLAMA = Subject(
    parse({"model_type": "llama", **SIZES}), "bfloat16", 80 * 10**9, 2048, 32768, 32768, "host"
)


def hardware() -> Hardware:
    """A catalogue device beside a large host memory: bytes do not depend on it."""
    known = catalogue("H100-SXM")
    return replace(known, tiers=(*known.tiers, Tier("host", 1 << 42)))


def plan_of(subject: Subject, rung: Rung, tokens: int) -> Plan:
    """One document of so many tokens."""
    count = len(subject.config.layers) + 2
    rest = Rest(*[subject.states] * 3)
    inner = replace(rest, activations="host") if rung.off else rest
    blocks = (Stage(i, i + 1, ("block",), inner) for i in range(1, count - 1))
    stages = (Stage(0, 1, rest=rest), *blocks, Stage(count - 1, count, rest=rest))
    return Plan(
        count, stages, 1, 1, tokens, Precision.named(subject.precision),
        subject.tile if rung.loss else 0, subject.tile if rung.mlp else 0,
        settings=NONE.having({"sequence_chunk": subject.chunk if rung.chunks else 0}),
    )  # fmt: skip


def request_of(subject: Subject, tokens: int) -> PlanRequest:
    return PlanRequest(
        1, tokens, Precision.named(subject.precision), AdamW(), documents=(0, tokens)
    )


def predicted(subject: Subject, facts: Facts, rung: Rung, tokens: int) -> Forecast:
    """One layer is rehearsed, on fake tensors, and stands for all."""
    plan = plan_of(subject, rung, tokens)
    chosen = sample(subject.config, plan)
    makers = native_makers(chosen.config, request_of(subject, tokens), (0, tokens))
    return compose(plan, expand(rehearse(chosen.plan, *makers), chosen, plan, facts), hardware())


def longest(subject: Subject, facts: Facts, rung: Rung) -> int:
    """Tokens of the longest document that fits: bytes grow evenly, so two lengths tell the next
    guess."""

    def needs(steps: int) -> int:
        return predicted(subject, facts, rung, steps * subject.step).peak

    low, high = 1, 2 * subject.chunk // subject.step
    at_low, at_high = needs(low), needs(high)
    for _ in range(8):
        slope = (at_high - at_low) / (high - low)
        guess = max(1, int(high + (subject.budget - at_high) / slope))
        if guess == high:
            break
        low, at_low, high, at_high = high, at_high, guess, needs(guess)
    while at_high > subject.budget:
        high -= 1
        at_high = needs(high)
    return high * subject.step


# -- the paper's baseline -------------------------------------------------------------------------


def hugging_face(tokens: int) -> int:
    """Bytes at the peak of a forward and a backward pass of the Hugging Face class of Llama 8B:
    its own loss, checkpoints of its blocks, each gradient given away when it is there."""
    with FakeTensorMode():
        torch.set_default_dtype(torch.bfloat16)
        model = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(**SIZES, use_cache=False, attn_implementation="sdpa")
        )
        torch.set_default_dtype(torch.float32)
        model.gradient_checkpointing_enable({"use_reentrant": False})
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(let_go)
        ids = torch.zeros(1, tokens, dtype=torch.int64)
        with Ledger() as ledger:
            model(input_ids=ids, labels=ids).loss.backward()
    return ledger.peak


def let_go(parameter: Tensor) -> None:
    parameter.grad = None


def basic() -> int:
    """Tokens of it that fit the device. Bytes grow evenly with them; what does not grow is taken to
    be elsewhere, weights and all."""
    few, many = LLAMA.step // 4, LLAMA.step // 2
    each = (hugging_face(many) - hugging_face(few)) / (many - few)
    return int(LLAMA.budget / each)


# -- real runs ------------------------------------------------------------------------------------


def batch_of(tokens: int, seed: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, SMALL.config.vocab, (1, tokens), generator=generator)
    return Batch(ids, torch.roll(ids, -1, 1), ((0, tokens),))


def run(plan: Plan, stores: Mapping[str, Store], ledger: Ledger | None = None) -> tuple[int, float]:
    """Measured peak and seconds of a real step."""
    flow = NativeFlow(build(SMALL.config, seed=0), plan)
    job = Job(flow, plan, Recipe(AdamW()), Here(ledger=ledger, stores=stores))
    job.step(batch_of(plan.sequence), 1e-4)
    return job.report.trace.peak(), job.report.seconds


def steps(plan: Plan, stores: Mapping[str, Store]) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and weights of two steps in float64."""
    model = build(SMALL.config, seed=0, dtype=torch.float64)
    job = Job(NativeFlow(model, plan), plan, Recipe(AdamW(weight_decay=0.0)), Here(stores=stores))
    losses = [float(job.step(batch_of(plan.sequence, step), 1e-3)) for step in range(2)]
    return losses, {name: w.clone() for name, w in job.weights()}


def plainly(tokens: int) -> tuple[list[float], dict[str, Tensor]]:
    """The same by PyTorch's own autograd, loss and AdamW over the bare model."""
    model = build(SMALL.config, seed=0, dtype=torch.float64)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-3, betas=AdamW().betas, eps=AdamW().eps, weight_decay=0.0
    )
    losses = []
    for step in range(2):
        batch = batch_of(tokens, step)
        loss = F.cross_entropy(logits(model, batch), batch.targets_BS.reshape(-1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, {name: p.detach() for name, p in model.named_parameters()}


def logits(model: Decoder, batch: Batch) -> Tensor:
    context = model.context(batch.positions().reshape(-1), batch.flat_bounds())
    x = model.prologue(batch.ids_BS.reshape(-1), context)
    for block in model.blocks:
        x = block(x, context)
    h: Tensor = model.epilogue(x, context)
    return h @ model.epilogue.head.weight.t()


def exact(tokens: int) -> tuple[float, bool]:
    """The combination, its checkpoints on a real disk: how far from the plain loop, relative; and
    whether it is bit for bit what it is with everything on the device."""
    plan = replace(plan_of(SMALL, LADDER[-1], tokens), precision=Precision.named("float64"))
    here = replace(plan, stages=tuple(replace(s, rest=Rest()) for s in plan.stages))
    there = replace(plan, stages=tiered.ends_keep(here.stages, Rest(activations="disk")))
    with (
        tempfile.TemporaryDirectory() as folder,
        open_stores([tiered.disk(folder, GIB)]) as stores,
    ):
        losses, weights = steps(there, stores)
    again, same = steps(here, {})
    bitwise = again == losses and all(torch.equal(w, same[n]) for n, w in weights.items())
    expected, plain = plainly(tokens)
    far = [abs(a - b) / b for a, b in zip(losses, expected, strict=True)]
    far += [float((weights[n] - w).abs().max() / w.abs().max()) for n, w in plain.items()]
    return max(far), bitwise


def chosen(tokens: int) -> Plan:
    """What the planner takes for such a sequence, given the device and host memory."""
    request = replace(
        request_of(SMALL, tokens), budget=SMALL.budget, tiers=(TierSpec("host", "memory", (), GIB),)
    )
    return choose(SMALL.config, request, hardware()).plan


def combined(plan: Plan) -> bool:
    inner = plan.stages[1:-1]
    return bool(plan.settings.get("sequence_chunk")) and all(s.whole and s.spills for s in inner)


def main() -> None:
    torch.manual_seed(0)
    found: dict[str, list[int]] = {}
    for name, subject in (("small", SMALL), ("Llama 8B", LLAMA)):
        facts = facts_of_model(subject.config, request_of(subject, subject.chunk))
        found[name] = []
        for rung in LADDER:
            found[name].append(longest(subject, facts, rung))
            print(f"  {name:10}{rung.name:30}{found[name][-1]:>10,} tokens", flush=True)
    facts = facts_of_model(SMALL.config, request_of(SMALL, SMALL.chunk))
    peaks, fits = [], True
    with open_stores([TierSpec("host", "memory", (), GIB)]) as stores:
        for place in (1, -1):
            tokens = found["small"][place]
            made = predicted(SMALL, facts, LADDER[place], tokens)
            peak, seconds = run(made.plan, stores, Ledger(SMALL.budget))
            fits = fits and 0.95 * made.peak <= peak <= made.peak <= SMALL.budget
            peaks.append(f"{tokens:,} tokens in {peak:,} bytes, predicted {made.peak:,}")
            print(f"  run: {LADDER[place].name}: {peaks[-1]}, {seconds:.1f} s")
    far, bitwise = exact(700)
    picks = combined(chosen(found["small"][-1]))
    theirs = basic()
    print(f"  Llama 8B as the Hugging Face class with its own checkpointing {theirs:>10,} tokens")
    whole, ours = ({n: f[-1] / f[place] for n, f in found.items()} for place in (0, 1))
    over = found["Llama 8B"][-1] / theirs
    conclude(
        'Bekman et al., "Arctic Long Sequence Training", 2025',
        "16x: from 32K to 500K tokens on one H100, Llama 8B",
        f"{over:.1f}x the Hugging Face class of Llama 8B, predicted, {theirs:,} to"
        f" {found['Llama 8B'][-1]:,} tokens; against our own block recompute with all logits"
        f" {whole['Llama 8B']:.1f}x (small one {whole['small']:.1f}x), with logits in chunks"
        f" {ours['Llama 8B']:.1f}x and {ours['small']:.1f}x; small one run: {'; '.join(peaks)};"
        f" {far:.0e} from a plain loop in float64, {'bit for bit' if bitwise else 'NOT'} that of"
        f" the device alone; the planner {'takes' if picks else 'DOES NOT take'} the combination",
        f"small: {len(SMALL.config.layers)} blocks, hidden {SMALL.config.hidden}, float32, states"
        f" on the device, {SMALL.budget:,} bytes in all, tiles {SMALL.tile}, chunks {SMALL.chunk};"
        f" Llama 8B: bfloat16, states in host memory, {LLAMA.budget:,} bytes, tiles {LLAMA.tile},"
        f" chunks {LLAMA.chunk}; AdamW; lengths by the forecast; the Hugging Face class by"
        f" the bytes of its passes alone, transformers {transformers.__version__}",
        Figure(
            "tokens of Llama 8B on one device of 80 GB",
            found["Llama 8B"][-1],
            PAPER,
            "",
            nothing=BASELINE,
            how="simulated",
        ),
        Figure("sequence over the Hugging Face class's", over, CLAIMED, how="simulated"),
        holds={
            "the ends fit their budget as predicted": fits,
            "equal to a plain loop at 1e-10": far <= 1e-10,
            "bit for bit that of the device alone": bitwise,
            "the planner takes the combination": picks,
        },
    )


if __name__ == "__main__":
    main()
