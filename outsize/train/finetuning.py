"""What a run that fine-tunes a trained model on chats has where nobody says otherwise, and the
signs by which it can be judged early.

Pareja et al., "Unveiling the Secret Recipe: A Guide For Supervised Fine-Tuning Small LLMs", 2024
(arXiv 2412.13337): large batches with low rates end better; a warm-up and a decay of the rate are
not needed; all data together do as well as phases; of two runs the one whose gradients have the
lower norm and whose loss is higher early on ends better. The rate of adapters is that of Dettmers
et al., "QLoRA", 2023 (arXiv 2305.14314).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from statistics import fmean
from typing import Any

from outsize.data import SOURCES, DataConfig
from outsize.data.files import find_files
from outsize.train.resolve import DERIVED, PASSES, Resolved, lengths

GUIDE, QLORA = "Pareja et al., 2024", "Dettmers et al., 2023"
ADAPTER_LR = 2e-4
LEAST_ROWS, MOST_ROWS = 4, 64  # of a step; the paper has thousands of samples, and the time
STEPS = 32  # of a pass over the data, at least, where that leaves rows enough
BYTES = 4  # of a token of text
EPOCHS = 3
EARLY = 0.1  # part of a run whose signs are looked at


def tunes(resolved: Resolved) -> bool:
    """Whether a trained model learns from documents that have targets of their own."""
    kinds = (kind for key, kind in SOURCES.items() if key in resolved.config.techniques)
    return resolved.get("model.weights") == "stored" and any(kind.weighed for kind in kinds)


def defaults(resolved: Resolved, adapted: bool) -> Resolved:
    """Fill in what is open, with the finding that it rests on. adapted: an adapter is trained."""
    if not tunes(resolved):
        return resolved
    if adapted:
        resolved = resolved.derive("optimizer.lr", ADAPTER_LR, f"an adapter ({QLORA})")
    sequence = resolved.get("train.sequence")
    rows = min(MOST_ROWS, max(LEAST_ROWS, _tokens(resolved) // sequence // STEPS))
    batch = f"{rows} rows of the sequence: large batches, as far as the data go ({GUIDE})"
    resolved = resolved.derive("train.batch_tokens", rows * sequence, batch)
    plain = f"neither warm-up nor decay is needed ({GUIDE})"
    if not resolved.given("learning_rate.shape"):
        resolved = resolved.with_value("learning_rate.shape", "constant", f"{DERIVED}{plain}")
    resolved = resolved.derive("learning_rate.warmup", 0, plain)
    if lengths(resolved):
        return resolved
    length = f"{DERIVED}passes over chats, where no length is said"
    return resolved.with_value(PASSES, float(EPOCHS), length)


def _tokens(resolved: Resolved) -> int:
    """About how many tokens the data have, by the bytes of their files."""
    paths = DataConfig(path=resolved.get("data.path")).paths()
    return sum(file.size for file in find_files(paths).files) // BYTES


def findings(resolved: Resolved) -> list[str]:
    """Which values of a run come from which finding, a line each."""
    rows = [(n, value, origin) for n, value, origin, _ in resolved.rows() if resolved.is_derived(n)]
    said = []
    for source in (GUIDE, QLORA):
        names = [f"{name} {value}" for name, value, origin in rows if source in origin]
        if names:
            said.append(f"by the findings of {source}: {', '.join(names)}")
    return said


def signs(records: Iterable[Mapping[str, Any]], steps: int) -> str | None:
    """What the beginning of a run says of its end; None where it was too short. records: of its
    metrics."""
    last = round(EARLY * steps)
    early = [one for one in records if "loss" in one and one["step"] <= last]
    if len(early) < 2:
        return None
    norm, loss = (fmean(one[name] for one in early) for name in ("gradient_norm", "loss"))
    return (
        f"early signs (first {len(early)} steps): gradient norm {norm:.3g}, loss {loss:.3f}; of two"
        f" runs on the same data the one with the lower norm and the higher loss ends better"
        f" ({GUIDE})"
    )
