"""Claim: a backward pass in chunks of the sequence holds sequences 2.8 to 5.5 times longer.

Luo et al., "StreamBP: Memory-Efficient Exact Backpropagation for Long Sequence Training of LLMs",
2025: against gradient checkpointing, whose logits exist all at once, in comparable or less time.
Lengths are found by bisection over the predicted peak; the longest is then run under a ledger that
raises above the budget. Both baselines are printed: block recompute with all logits at once (the
paper's), and with chunks of logits (ours). Times are of real steps at one length, taken in turns.
The paper's own condition is a Hugging Face class with its own loss: an unmodified one of the same
shape goes through `prepare` with both, its lengths those of real steps within the budget.
"""

from __future__ import annotations

import torch
import transformers
from verdict import Figure, conclude

import outsize
from outsize.data import Batch
from outsize.errors import OutsizeError
from outsize.hardware import catalogue
from outsize.memory import Ledger
from outsize.models.build import build
from outsize.models.families import parse
from outsize.optim import AdamW
from outsize.plan import Plan, Precision
from outsize.plan.settings import NONE
from outsize.runtime import Job, NativeFlow
from outsize.runtime.recipe import Here, Recipe
from outsize.search import PlanRequest, choose, native_makers
from outsize.simulate import Forecast
from outsize.simulate.rehearse import rehearse

MIB = 2**20
BUDGET, CHUNK, LOGITS, TIMED = 192 * MIB, 1024, 512, 4096
STEP = 256  # tokens to which lengths are found
CONFIG = parse(
    {
        "model_type": "llama",
        "vocab_size": 8192,
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 12,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1 << 17,
        "tie_word_embeddings": True,
    }
)
WAYS = {"all logits": (0, 0), "chunks of logits": (LOGITS, 0), "chunks": (LOGITS, CHUNK)}


def request_of(way: str, tokens: int) -> PlanRequest:
    """One document of so many tokens, blocks recomputed whole."""
    logits, chunk = WAYS[way]
    return PlanRequest(
        1, tokens, Precision.named("float32"), AdamW(), recompute=("block",), mlp_tile=0,
        loss_chunk=logits, settings=NONE.having({"sequence_chunk": chunk}), documents=(0, tokens),
    )  # fmt: skip


def predicted(way: str, tokens: int) -> Forecast:
    return choose(CONFIG, request_of(way, tokens), catalogue("H200"))


def longest(way: str) -> int:
    """Tokens of the longest document that fits the budget."""
    low, high = 0, 1
    while predicted(way, high * STEP).peak <= BUDGET:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        fits = predicted(way, middle * STEP).peak <= BUDGET
        low, high = (middle, high) if fits else (low, middle)
    return low * STEP


def job_of(plan: Plan, ledger: Ledger | None = None) -> tuple[Job, Batch]:
    model = build(CONFIG, seed=0)
    ids = torch.randint(0, CONFIG.vocab, (1, plan.sequence))
    batch = Batch(ids, torch.roll(ids, -1, 1), ((0, plan.sequence),))
    return Job(NativeFlow(model, plan), plan, Recipe(AdamW()), Here(ledger=ledger)), batch


def seconds(tokens: int) -> dict[str, float]:
    """The best of three backward passes of all blocks, their recomputation included."""
    jobs = {way: job_of(predicted(way, tokens).plan) for way in ("chunks of logits", "chunks")}
    best = dict.fromkeys(jobs, float("inf"))
    for _ in range(3):
        for way, (job, batch) in jobs.items():
            job.step(batch, 1e-4)
            spent = sum(
                event.end - event.start
                for event in job.report.trace.events
                if event.kind in ("RECOMPUTE", "BACKWARD")
            )
            best[way] = min(best[way], spent)
    return best


# What is not said the planner says: within a budget it would take chunks by itself.
ADOPTED: dict[str, dict[str, int]] = {
    "all logits": {"loss_chunk": 0, "sequence_chunk": 0},
    "chunks of logits": {"loss_chunk": LOGITS, "sequence_chunk": 0},
    "chunks": {"loss_chunk": LOGITS, "sequence_chunk": CHUNK},
    "the planner's own": {},
}


def stepped(way: str, tokens: int) -> float:
    """Seconds of a real step of the Hugging Face class within the budget; OutsizeError where that
    is too small."""
    config = transformers.LlamaConfig(
        vocab_size=8192, hidden_size=128, intermediate_size=384, num_hidden_layers=12,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=1 << 17,
        tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    job = outsize.prepare(model, "adamw", BUDGET, recompute=["block"], **ADOPTED[way])  # type: ignore[arg-type]
    ids = torch.randint(0, CONFIG.vocab, (1, tokens))
    job.step({"input_ids": ids, "labels": ids, "use_cache": False})
    seconds = job.report.seconds
    job.close()
    return seconds


def fitting(way: str) -> int:
    """Tokens of the longest sequence of which a step of the Hugging Face class fits the budget."""

    def fits(steps: int) -> bool:
        try:
            stepped(way, steps * STEP)
        except OutsizeError as error:
            if "too small" not in str(error):
                raise
            return False
        return True

    low, high = 0, 4
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low * STEP


def operations(way: str, tokens: int) -> tuple[float, float]:
    """Of a step: all, and those of attention."""
    request = request_of(way, tokens)
    costs = rehearse(predicted(way, tokens).plan, *native_makers(CONFIG, request, (0, tokens)))
    work = [cost.work for cost in costs.actions.values()]
    return sum(w.flops() for w in work), sum(sum(w.attention.values()) for w in work)


def confirmed(tokens: int) -> tuple[int, int]:
    """Predicted and measured peak of a real step at this length; the ledger raises over budget."""
    made = predicted("chunks", tokens)
    job, batch = job_of(made.plan, Ledger(BUDGET))
    job.step(batch, 1e-4)
    return made.peak, job.report.trace.peak()


def main() -> None:
    torch.manual_seed(0)
    lengths = {way: longest(way) for way in WAYS}
    tokens = lengths["chunks"]
    ratios = {way: tokens / other for way, other in lengths.items()}
    peak, found = confirmed(tokens)
    spent = seconds(TIMED)
    slower = spent["chunks"] / spent["chunks of logits"]
    (all_ours, _), (all_block, attention) = (operations(w, TIMED) for w in ("chunks", "all logits"))
    full = all_block + attention  # a kernel that is given a mask makes the other half as well
    adopted = {way: fitting(way) for way in ADOPTED}
    for way, length in adopted.items():
        print(f"  Hugging Face Llama, {way}: {length:,} tokens")
    gain = {way: adopted["chunks"] / length for way, length in adopted.items()}
    taken = {way: stepped(way, adopted["all logits"]) for way in ("all logits", "chunks")}
    longer = taken["chunks"] / taken["all logits"]
    conclude(
        'Luo et al., "StreamBP", 2025',
        "2.8 to 5.5 times the sequence of gradient checkpointing, in comparable or less time,"
        " with fewer operations",
        f"{ratios['all logits']:.2f}x block recompute with all logits ({lengths['all logits']:,} to"
        f" {tokens:,} tokens), {ratios['chunks of logits']:.2f}x block recompute with chunks of"
        f" logits ({lengths['chunks of logits']:,}); run at {tokens:,}: {found:,} bytes, predicted"
        f" {peak:,}; backward at {TIMED:,} tokens {slower:.2f}x the time of block recompute;"
        f" operations {all_ours / all_block:.3f}x of block recompute, whose kernel leaves out what"
        f" causality hides too, {all_ours / full:.2f}x of one over all scores under a mask; an"
        f" unmodified Hugging Face Llama {gain['all logits']:.2f}x its own gradient checkpointing"
        f" ({adopted['all logits']:,} to {adopted['chunks']:,} tokens, run),"
        f" {gain['chunks of logits']:.2f}x with logits in chunks, a step {longer:.2f}x as long",
        f"{len(CONFIG.layers)} blocks, hidden {CONFIG.hidden}, vocabulary {CONFIG.vocab}, budget"
        f" {BUDGET:,} bytes in all, chunk {CHUNK}, AdamW, float32; lengths by the forecast",
        Figure("sequence over block recompute, all logits", ratios["all logits"], 5.5),
        Figure("sequence over block recompute, logits in chunks", ratios["chunks of logits"], 2.8),
        Figure("sequence over a Hugging Face class's own checkpointing", gain["all logits"], 5.5),
        Figure("step of a Hugging Face class", longer, 1.0, nothing=2.0, less=True, timed=True),
        Figure("time of the backward pass", slower, 1.0, nothing=2.0, less=True, timed=True),
        Figure("operations of block recompute", all_ours / all_block, 1.0, nothing=2.0, less=True),
        holds={"the longest runs as predicted, in its budget": found <= peak <= BUDGET},
    )


if __name__ == "__main__":
    main()
