"""Claim: products of 8 bits with outlier features apart lose nothing, in half of 16 bits' memory.

Dettmers et al., "LLM.int8()", 2022: from 6.7G parameters on, a few features of a transformer are
20 times as large as the others; a scale for each token and each output then loses quality (C4
perplexity 12.45 to 16.48 at 13G), and nothing where numbers of magnitude 6 or more are multiplied
as they are (12.45). Models that are trained here are too small for such features to come by
themselves: one is planted before training, a weight of 20 in each norm, and training goes on around
it. What is compared is one model, held in bfloat16 and in each form by the product's own formats.

A token's outliers are its own here, where the paper takes a column of the whole batch. Speed: of
one layer's matrices at two of the paper's widths, beside bfloat16's.

    python claims/llm_int8.py [--steps 400] [--folder /tmp]
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from verdict import Figure, conclude

from outsize.checkpoint import adapters, hub
from outsize.kernels import rows
from outsize.kernels.eights import OUTLIER
from outsize.models.build import build
from outsize.models.coding import Grid, asked, format_of
from outsize.models.decoder import Decoder
from outsize.models.families import parse
from outsize.models.linear import Linear, linears
from outsize.models.presets import PRESETS
from outsize.serve.formats import loss_of, text_of

PLANTED, TIMES, TOKENS = 5, 20.0, 16384  # a feature, its size, tokens of held-out text
READERS = (".q", ".k", ".v", ".gate", ".up")  # of what a norm gives
ROWS_ALONE, OURS = "int8-rows+a8", "int8-rows+outliers"
NAMES = ("int8-rows", ROWS_ALONE, OURS)
WIDTHS, COUNT, ROUNDS, SHARE = (768, 4096), 64, 15, 1e-3  # inputs; tokens; of which are outliers
SMALL = "a model of 1M parameters with a planted feature"


def planted(folder: Path, steps: int) -> Path:
    """A model of the preset mini with large features, trained on the standard library. It begins
    as the same function without: weights of what reads a large feature are as much smaller."""
    model = build(parse(PRESETS["mini"]), seed=0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("_norm.weight") and name.startswith("blocks."):
                weight[PLANTED] = TIMES
        for name, one in linears(model):
            if name.endswith(READERS):
                one.weight[:, PLANTED] /= TIMES
    hub.save(model, folder / "begun")
    said = {
        "model": folder / "begun", "train.steps": steps, "optimizer.lr": 2e-3,
        "train.sequence": 256, "train.batch_tokens": 2048, "sample.tokens": 0,
        "train.evaluate_every": 0, "data.tokenizer": "bytes", "output": folder / "run",
    }  # fmt: skip
    words = [word for key, value in said.items() for word in ("--set", f"{key}={value}")]
    subprocess.run([sys.executable, "-m", "outsize", "train", *words], check=True)
    return adapters.model_directory(folder / "run")


def found_in(model: Decoder, ids: Tensor) -> tuple[float, float]:
    """The part of numbers that matrices multiply which are outliers, and the largest."""
    counted, largest = [0, 0], [0.0]

    def see(one: Linear, args: tuple[Tensor, ...]) -> None:
        counted[0] += int((args[0].abs() >= OUTLIER).sum())
        counted[1] += args[0].numel()
        largest[0] = max(largest[0], float(args[0].abs().max()))

    handles = [one.register_forward_pre_hook(see) for _, one in linears(model)]
    with torch.no_grad():
        model(ids)
    for handle in handles:
        handle.remove()
    return counted[0] / counted[1], largest[0]


def bytes_of(model: Decoder) -> int:
    """Of the matrices that are coded."""
    return sum(one.bytes for _, one in linears(model))


def seconds(*calls: Callable[[], object]) -> list[float]:
    """Of each call on the processor: the least of rounds in which they take turns."""
    least = [float("inf")] * len(calls)
    for _ in range(ROUNDS):
        for n, call in enumerate(calls):
            begin = time.process_time()
            call()
            least[n] = min(least[n], time.process_time() - begin)
    return least


def speed(width: int) -> float:
    """How much quicker COUNT tokens are multiplied than in bfloat16, a matrix to four times the
    width."""
    draw = torch.Generator().manual_seed(0)
    weight = torch.randn(4 * width, width, generator=draw)
    x = torch.randn(COUNT, width, generator=draw)
    x[:, : max(1, int(width * SHARE))] *= TIMES
    form = format_of("int8-rows")
    codes, shared = form.encode(weight)
    laid = form.laid(codes, shared, Grid(width // form.group))
    assert laid is not None, "it has blocks"
    narrow, wide = x.bfloat16(), weight.bfloat16()
    whole, coded = seconds(
        lambda: rows.linear(narrow, wide, None),
        lambda: rows.by_codes(narrow, laid, 4 * width, None, "+outliers"),
    )
    return whole / coded


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="outsize-int8-", dir=options.folder) as scratch:
        directory = planted(Path(scratch), options.steps)
        config = adapters.read_config(directory)
        text = text_of((), "bytes", config, TOKENS)
        plain = adapters.load(directory, config=config, dtype=torch.bfloat16)
        ids = next(iter(text)).ids_BS
        share, largest = found_in(plain, ids)
        whole, bits = bytes_of(plain), {"bf16": text.bits_per_byte(loss_of(plain, text))}
        for name in NAMES:
            one = adapters.load(
                directory, config=asked(config, name, "claim"), dtype=torch.bfloat16
            )
            bits[name], held = text.bits_per_byte(loss_of(one, text)), bytes_of(one)
    more = {name: bits[name] / bits["bf16"] - 1 for name in NAMES}
    quicker = {width: speed(width) for width in WIDTHS}
    each = "; ".join(f"{name} {value:.4f}" for name, value in bits.items())
    timed = ", ".join(f"{width}: {value:.2f}x" for width, value in quicker.items())
    lost = more[ROWS_ALONE]
    won = (lost - more[OURS]) / lost if lost > 0 else None
    conclude(
        'Dettmers et al., "LLM.int8()", 2022',
        "no loss (C4 perplexity of 13B 12.45, 16.48 with outliers rounded too), half the memory",
        f"bits per byte {each}; {share:.2%} of what is multiplied is of magnitude {OUTLIER:g} or"
        f" more, {largest:.0f} at most; products of {COUNT} rows over bfloat16's by width {timed}",
        f"preset mini, a feature of {TIMES:g}, {options.steps} steps, {text.tokens:,} tokens",
        Figure("of what rounding outliers too loses, won back", won, 1.0, "%", nothing=0.0,
               other=SMALL),
        Figure("less memory of matrices", whole / held, 2.0, other="rows as short as 192"),
        Figure("speed of products over 16 bits", quicker[4096], 1.0, timed=True,
               other="a processor's vectors"),
    )  # fmt: skip


if __name__ == "__main__":
    main()
