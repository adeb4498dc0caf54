"""Claim: two layers at a time, drawn at random, teach more than LoRA does in no more memory.

Pan et al., "LISA: Layerwise Importance Sampling for Memory-Efficient Large Language Model
Fine-Tuning", 2024 (arXiv 2403.17919): 75 GB with two layers of LLaMA-2-70B, 79 GB by LoRA of rank
128; MT-Bench scores 11% to 37% above LoRA's, and at or above those of full fine-tuning.

Bytes are foretold of the paper's shape, all on one device, and the ledger says of a small job
whether they grow with the switches. Quality: a small decoder over bytes learns one half of Python's
standard library, then is fine-tuned on the package of e-mail: all of it, by LISA and by LoRA, each
at the best of RATES. Judged is the share of next bytes of held-out files that are right.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from slimfit import BEFORE, CONFIG, HELD, LAYERS, ROWS, SEQUENCE, batches, text
from verdict import Figure, conclude

import outsize
from outsize.data import Batch
from outsize.hardware import catalogue
from outsize.memory import Ledger
from outsize.models.build import build
from outsize.models.config import DecoderConfig
from outsize.models.decoder import Decoder
from outsize.models.families import parse
from outsize.optim import AdamW
from outsize.plan import Plan, Precision
from outsize.plan.plan import per_segment
from outsize.runtime import Job, NativeFlow
from outsize.runtime.recipe import Here, Recipe
from outsize.search import PlanRequest, predict
from outsize.techniques.adapt.lora import Lora
from outsize.techniques.lisa import KEY, Lisa

SHAPE = {
    "model_type": "llama", "vocab_size": 32000, "hidden_size": 8192, "intermediate_size": 28672,
    "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8,
    "max_position_embeddings": 4096, "tie_word_embeddings": False,
}  # fmt: skip
RANK, SMALL_RANK, TOKENS = 128, 8, 1024  # of the paper's LoRA, of ours; of a row
STEPS, GAP = 100, 10
RATES = (3e-3, 1e-2, 3e-2)
LESS, MORE = 75 / 79, 0.11  # of LoRA's memory; of LoRA's scores
BF16 = Precision("bfloat16", None, "bfloat16", "bfloat16")  # weights, gradients and moments
Said = Mapping[str, Any]


def foretold(
    config: DecoderConfig,
    said: Said,
    precision: Precision = BF16,
    rows: int = 1,
    again: bool = False,
) -> int:
    """Bytes at the peak of a step. said: the technique that names what is trained, if any; again:
    whether blocks are computed again."""
    size = len(config.layers) + 2
    names = (*said, *(() if precision.master else ("bfloat16-weights",)))
    plan = Plan(
        size, per_segment(size, ("block",) if again else ()), rows, rows, TOKENS, precision,
        loss_chunk=TOKENS, approximate=names,
    )  # fmt: skip
    request = PlanRequest(
        rows, TOKENS, precision, AdamW(), documents=(0, TOKENS), approximate=names, techniques=said
    )
    return predict(config, request, plan, catalogue("A100-SXM-80")).peak


def job_of(model: Decoder, said: Said, ledger: Ledger | None = None) -> Job:
    """A job of small steps."""
    size = LAYERS + 2
    plan = Plan(size, per_segment(size), ROWS, ROWS, SEQUENCE, approximate=tuple(said))
    recipe = Recipe(AdamW(weight_decay=0.0), 1.0, techniques=said, seed=1)
    return Job(NativeFlow(model, plan), plan, recipe, Here(ledger=ledger))


def tuned(job: Job, data: Sequence[Batch], rate: float) -> Decoder:
    """The model behind the last step. The learning rate falls to 0."""
    for step, batch in enumerate(data):
        job.step(batch, rate * (1 - step / len(data)))
    job.close()
    return job.flow.model


@torch.no_grad()
def right(model: Decoder, data: Sequence[Batch]) -> float:
    """The share of next bytes that a model has right."""
    found = [model(one.ids_BS).argmax(-1) == one.targets_BS for one in data]
    return float(torch.cat(found).double().mean())


def lessons() -> tuple[list[Batch], list[Batch], list[Batch]]:
    """What is learnt first, what is tuned on, and what is held out."""
    general, special = text("[a-m]*.py", 1 << 21), text("email/*.py", 1 << 20)
    cut = len(special) * 4 // 5
    first, tuning = batches(general, BEFORE, 1), batches(special[:cut], STEPS, 3)
    return first, tuning, batches(special[cut:], HELD, 2)


def best(way: str, tune: Callable[[float], Decoder], held: Sequence[Batch]) -> float:
    """The share of right bytes at the rate of RATES that is best for it."""
    tried = {rate: right(tune(rate), held) for rate in RATES}
    print(f"  {way}: " + ", ".join(f"{x:.2%} at {r:g}" for r, x in tried.items()), flush=True)
    return max(tried.values())


def compared(way: str, said: Said) -> tuple[float, dict[str, float]]:
    """Shares of right bytes before any tuning, and with all trained, by LoRA and by the way whose
    technique is `said`."""
    first, tuning, held = lessons()
    base = tuned(job_of(build(parse(CONFIG), seed=1), {}), first, 3e-3)
    lora = outsize.adapt(copy.deepcopy(base), "lora", rank=SMALL_RANK, alpha=2.0 * SMALL_RANK)
    ways = {"full": (base, {}), "LoRA": (lora, {}), way: (base, said)}
    found = {}
    for name, (model, own) in ways.items():

        def tune(rate: float, model: Decoder = model, own: Said = own) -> Decoder:
            return tuned(job_of(copy.deepcopy(model), own), tuning, rate)

        found[name] = best(name, tune, held)
    return right(base, held), found


def steady() -> bool:
    """Whether a job holds as much after 12 switches as after one."""
    ledger = Ledger()
    job = job_of(build(parse(CONFIG), seed=1), {KEY: Lisa(2, 1)}, ledger)
    (batch,), held = batches(text("email/*.py", 1 << 16), 1, 4), []
    for _ in range(13):
        job.step(batch, 0.0)
        held.append({kind: count for kind, count in ledger.live.items() if count})
    return held[1] == held[-1]


def main() -> None:
    config = parse(SHAPE)
    two, lora = {KEY: Lisa(2)}, replace(config, adapter=Lora(rank=RANK))
    peak, most = foretold(config, two), foretold(lora, {})
    again = foretold(config, two, again=True) / foretold(lora, {}, again=True)
    before, found = compared(KEY, {KEY: Lisa(2, GAP)})
    smaller = f"right bytes of a decoder of {LAYERS} blocks, no scores of MT-Bench"
    conclude(
        'Pan et al., "LISA", 2024',
        "75 GB of LLaMA-2-70B for LoRA's 79 GB; MT-Bench scores 11% to 37% above LoRA's",
        f"LLaMA-2-70B {peak / 1e9:.0f} GB for LoRA's {most / 1e9:.0f} GB, foretold ({again:.3f}x"
        f" where blocks are computed again); right bytes {found[KEY]:.2%}, LoRA"
        f" {found['LoRA']:.2%}, all trained {found['full']:.2%}, before {before:.2%}",
        f"memory: one row of {TOKENS}, weights, gradients and moments in bfloat16, nothing computed"
        f" again, all on one device; quality: {LAYERS} blocks of {CONFIG['hidden_size']},"
        f" {STEPS} steps of {ROWS} x {SEQUENCE} bytes of e-mail's files, AdamW at the best of"
        f" {len(RATES)} rates, 2 layers for {GAP} steps, LoRA of rank {SMALL_RANK}",
        Figure("memory over LoRA's", peak / most, LESS, less=True, how="simulated",
               other="all on one device"),
        Figure("right more than by LoRA", found[KEY] / found["LoRA"] - 1, MORE, "%", nothing=0.0,
               other=smaller),
        Figure("right more than with all trained", found[KEY] / found["full"] - 1, 0.0, "%",
               nothing=before / found["full"] - 1, other=smaller),
        holds={"as many bytes after 12 switches as after one": steady()},
    )  # fmt: skip


if __name__ == "__main__":
    main()
