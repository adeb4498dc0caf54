"""What a run leaves open, filled in from the model, the machine and the forecast, with the reason.

The numbers here are the defaults of a run. Those without a source beside them were tried on the
default run (docs/log.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from outsize.data import SOURCES, DataConfig, detected
from outsize.errors import OutsizeError
from outsize.hardware import Device, host
from outsize.models.config import DecoderConfig
from outsize.optim.parse import RATES, SCHEDULES
from outsize.train import finetuning
from outsize.train.resolve import DERIVED, Resolved

MINUTES = 1.0  # of training, where nothing says how long
SEQUENCE = 512  # tokens of a row, or fewer where the model has fewer positions
ROWS = 4  # of a step: few, since small models learn by their number of steps
FASTER = 1.25  # bfloat16 is taken where its products are so much faster
FRESH_LR, FRESH_WIDTH = 3e-3, 256  # AdamW from random weights at this width; goes with 1 / width
# (Yang et al., "Tensor Programs V", 2022)
STORED_LR = 2e-5  # AdamW from trained weights
SGD_LR = 0.1
ZEROTH_LR = 1e-6  # Malladi et al., "MeZO", 2023, appendix: 1e-6 or 1e-7 for whole models
WARMUP = 0.05  # part of the steps
MOST_WARMUP = 2000  # steps
EVALUATIONS = 5  # in a run
EVALUATED = 0.05  # validation tokens of one evaluation, as a part of all training tokens
FORWARD = 1 / 3  # of a step's time a token: backward takes twice the operations of forward
LEAST_EVALUATED, MOST_EVALUATED = 4096, 1 << 20  # tokens
SAVE_SECONDS = 60.0  # predicted, between checkpoints


def source(resolved: Resolved) -> Resolved:
    """Fill in what a document is, where the records of the data say it and the user does not."""
    if resolved.get("data.kind") == "text" or any(map(resolved.said, SOURCES.names())):
        return resolved
    paths = DataConfig(path=resolved.get("data.path")).paths()
    found = detected(paths, resolved.get("data.field"))
    if found is None:
        return resolved
    key, form, file = found
    return resolved.with_value(key, True, f"{DERIVED}{file.path} has chats ({form})")


def threads(resolved: Resolved) -> Resolved:
    """Fill in the threads of an operator: PyTorch's own choice, which knows of no quota."""
    own, has = torch.get_num_threads(), host.cores()
    if own <= has:
        return resolved.derive("threads", own, "PyTorch's own choice here")
    return resolved.derive("threads", has, f"of the cores {host.granted():g} are granted")


def row_of(resolved: Resolved, directory: Path) -> Resolved:
    """Fill in the tokens of a row, of a model of which nothing but its config is read."""
    from outsize.checkpoint.hub import read_config

    has = (directory / "config.json").is_file()
    positions = read_config(directory).positions if has else SEQUENCE
    return resolved.derive("train.sequence", min(SEQUENCE, positions), "the model's positions")


def before_plan(resolved: Resolved, config: DecoderConfig, device: Device) -> Resolved:
    """Fill in what the plan needs: sequence, batch, precision, learning rate."""
    positions = config.positions
    sequence = min(SEQUENCE, positions)
    resolved = resolved.derive(
        "train.sequence", sequence, f"{SEQUENCE}, or the model's {positions} positions"
    )
    resolved = finetuning.defaults(resolved, config.adapter is not None)
    sequence = resolved.get("train.sequence")
    if sequence > positions:
        raise OutsizeError(
            f"train.sequence is {sequence}, longer than the {positions} positions that the model"
            f" has; expected at most {positions}"
        )
    resolved = resolved.derive(
        "train.batch_tokens", ROWS * sequence, f"{ROWS} rows of the sequence"
    )
    batch = resolved.get("train.batch_tokens")
    if batch % sequence:
        near = max(1, round(batch / sequence)) * sequence
        raise OutsizeError(
            f"train.batch_tokens is {batch}, not a multiple of train.sequence ({sequence});"
            f" expected for instance {near}"
        )
    resolved = _precision(resolved, device)
    return _learning_rate(resolved, config)


def _precision(resolved: Resolved, device: Device) -> Resolved:
    plain, half = device.peak.get("fp32"), device.peak.get("bf16")
    if plain is None or half is None:
        name, known = ("float32", plain) if half is None else ("bfloat16", half)
        return resolved.derive("precision", name, "the only one with a known rate" if known else "")
    ratio = half.value / plain.value
    name = "bfloat16" if ratio >= FASTER else "float32"
    return resolved.derive("precision", name, f"bfloat16 products run {ratio:.1f}x as fast here")


def _learning_rate(resolved: Resolved, config: DecoderConfig) -> Resolved:
    if "zeroth-order" in resolved.get("plan.approximate"):
        return resolved.derive("optimizer.lr", ZEROTH_LR, "zeroth-order")
    if resolved.get("optimizer.name") == "sgd":
        return resolved.derive("optimizer.lr", SGD_LR, "sgd")
    lr, reason = STORED_LR, "adamw from trained weights"
    if resolved.get("model.weights") != "stored":
        lr = float(f"{FRESH_LR * FRESH_WIDTH / config.hidden:.3g}")
        reason = (
            f"adamw from random weights, {FRESH_LR:g} x {FRESH_WIDTH} / hidden size {config.hidden}"
        )
    name = resolved.get("optimizer.name")
    shape = SCHEDULES.find(name)
    if shape is not None and not resolved.given("learning_rate.shape"):
        resolved = resolved.with_value("learning_rate.shape", shape[0], f"{DERIVED}{shape[1]}")
    own = RATES.find(name)
    if own is not None:
        lr, reason = own(lr), f"{name}, where it would be {lr:g} for {reason}"
    return resolved.derive("optimizer.lr", lr, reason)


def after_plan(resolved: Resolved, step_seconds: float) -> Resolved:
    """Fill in what depends on how long a step is predicted to take (seconds)."""
    resolved = _steps(resolved, step_seconds)
    steps, batch = resolved.get("train.steps"), resolved.get("train.batch_tokens")
    resolved = resolved.derive(
        "learning_rate.warmup", warmup_of(steps), f"{WARMUP:.0%} of the steps"
    )
    every = max(1, -(-steps // EVALUATIONS))
    resolved = resolved.derive("train.evaluate_every", every, f"{EVALUATIONS} times in the run")
    looked = round(EVALUATED * steps * batch)
    looked = min(MOST_EVALUATED, max(LEAST_EVALUATED, looked))
    resolved = resolved.derive(
        "train.evaluate_tokens", looked, f"{EVALUATED:.0%} of the training tokens, within bounds"
    )
    apart = min(steps, max(1, round(SAVE_SECONDS / step_seconds)))
    return resolved.derive(
        "train.save_every", apart, f"about {SAVE_SECONDS:g} s at the predicted {step_seconds:.3g} s"
    )


def warmup_of(steps: int) -> int:
    """The warm-up of a run of so many steps, where nobody says another."""
    return min(MOST_WARMUP, round(WARMUP * steps))


def warmup_now(then: Mapping[str, Any], steps: int | None) -> int | None:
    """The warm-up of a run that goes on, now with so many steps: as long as before where somebody
    said how long, else as it is derived. then: the values that it had."""
    before, had = then.get("learning_rate.warmup"), then.get("train.steps")
    if not isinstance(before, int) or not isinstance(had, int) or steps is None:
        return None
    return warmup_of(steps) if before == warmup_of(had) else before


def _steps(resolved: Resolved, step_seconds: float) -> Resolved:
    if resolved.get("train.steps") is not None:
        return resolved
    batch, tokens = resolved.get("train.batch_tokens"), resolved.get("train.tokens")
    if tokens is not None:
        return resolved.derive("train.steps", -(-tokens // batch), "train.tokens over batch_tokens")
    if resolved.get("train.minutes") is None:
        resolved = resolved.with_value("train.minutes", MINUTES, "default where no length is said")
    minutes = resolved.get("train.minutes")
    # Evaluations are part of the time.
    whole = step_seconds * (1 + EVALUATIONS * EVALUATED * FORWARD)
    steps = max(1, int(minutes * 60 / whole))
    reason = f"{minutes:g} min at the predicted {step_seconds:.3g} s a step, evaluations included"
    return resolved.derive("train.steps", steps, reason)


def output(resolved: Resolved) -> Resolved:
    """Fill in where the run goes: a directory that is not there yet."""
    if resolved.get("output") is not None:
        return resolved
    name = Path(resolved.config.model.name).expanduser().resolve().name
    number = 1
    while (path := Path("runs") / f"{name}-{number}").exists():
        number += 1
    return resolved.derive("output", str(path), "the first that is free")
