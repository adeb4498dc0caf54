"""Claim: layouts that differ by part of a model, converted where they meet, beat one strategy.

Yuan et al., "OneFlow: Redesign the Distributed Deep Learning Framework from Scratch", 2021. A
classifier of very many classes is cut over the devices and what is before it has data parallelism
on the same ones, as in its face recognition; here the classes are a vocabulary, and the blocks
share rows over the tensor axis (`blocks_by_rows`), as many as the planner finds. Run: the bytes
of every conversion, counted between threads, against those that follow from the layouts, and drawn
plans against plain PyTorch. Simulated: a step on eight V100 of 16 GB by the product's planner,
against pure data parallelism, with and without sharded optimizer states, and pure tensor
parallelism.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import islice

import torch
from verdict import Figure, conclude

from outsize.collectives import Mesh, World, along
from outsize.collectives.threads import play
from outsize.errors import OutsizeError
from outsize.hardware import catalogue
from outsize.memory import format_bytes
from outsize.models.config import DecoderConfig
from outsize.models.families import parse
from outsize.optim import AdamW
from outsize.parallel.layouts import PARTIAL, REPLICATED, Layout, Sharded, operation
from outsize.parallel.sums import cross
from outsize.plan import Precision, Sharding, zero
from outsize.plan.settings import NONE
from outsize.search import PlanRequest, choose
from outsize.simulate import Forecast
from outsize.verify import verify
from outsize.verify.draw import Drawn, draws

DEVICES, MEMORY, SEQUENCE = 8, 16 << 30, 128
CLASSES, FEW, MANY = (65_536, 262_144, 1_048_576), 32, 128  # and rows of a step
SPLIT, OTHER = Sharded(0), Sharded(1)
# Bytes of a conversion over p devices, in sizes of the whole tensor and over all of them.
CONVERSIONS: Mapping[tuple[Layout, Layout], Callable[[int], float]] = {
    (SPLIT, SPLIT): lambda p: 0.0,
    (SPLIT, OTHER): lambda p: (p - 1) / p,
    (SPLIT, REPLICATED): lambda p: p - 1.0,
    (REPLICATED, SPLIT): lambda p: 0.0,
    (REPLICATED, REPLICATED): lambda p: 0.0,
    (PARTIAL, SPLIT): lambda p: p - 1.0,
    (PARTIAL, REPLICATED): lambda p: 2.0 * (p - 1),
    (PARTIAL, PARTIAL): lambda p: 0.0,
}
DRAWN, WORKERS = 6, 4


def counted(source: Layout, target: Layout, devices: int) -> float:
    """Bytes that a conversion has brought to all devices, in sizes of the whole tensor; NaN where
    what it gives is not the tensor."""
    whole_AB = torch.arange(240 * 64, dtype=torch.float64).view(240, 64)
    name = operation(source, target)

    def work(world: World) -> tuple[int, bool]:
        axis = along(world, "tensor")
        rows, columns = (whole_AB.chunk(devices, dim)[axis.rank] for dim in (0, 1))
        given = {SPLIT: rows, REPLICATED: whole_AB, PARTIAL: whole_AB / devices}[source]
        wanted = {SPLIT: rows, OTHER: columns, REPLICATED: whole_AB, PARTIAL: given}[target]
        if name == "all_to_all":
            pieces = [piece.contiguous() for piece in given.chunk(devices, 1)]
            out = [torch.empty_like(pieces[axis.rank]) for _ in range(devices)]
            axis.all_to_all(pieces, out)
            made = torch.cat(out)
        else:
            made = cross(given.clone(), (name, "none"), axis, 0, len(whole_AB))
        return sum(axis.received.values()), torch.allclose(made, wanted)

    found = play(Mesh(tensor=devices), work)
    right = all(same for _, same in found)
    return sum(had for had, _ in found) / whole_AB.nbytes if right else float("nan")


def conversions() -> int:
    """How many of them bring what follows from the layouts, on two, four and eight devices."""
    right = 0
    for (source, target), bytes_of in CONVERSIONS.items():
        ours = [counted(source, target, p) for p in (2, 4, 8)]
        theirs = [bytes_of(p) for p in (2, 4, 8)]
        right += all(abs(a - b) < 1e-9 for a, b in zip(ours, theirs, strict=True))
        print(f"  (run) {source} to {target}: {ours} of {theirs} sizes of the tensor")
    return right


def exact() -> bool:
    """Whether drawn plans in which blocks share rows give the numbers of plain PyTorch."""
    every = (one for seed in range(1000) for one in islice(draws(seed, WORKERS, "float64"), 1))
    some = (one for one in every if isinstance(one, Drawn) and one.case.plan.by_rows)
    return all(verify(one.case, own=False).holds for one in islice(some, DRAWN))


# -- a step, simulated -----------------------------------------------------------------------------


def model(classes: int) -> DecoderConfig:
    """Features of 512, as those of a face; blocks of which nobody would cut one."""
    sizes = {"hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 12}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8}
    return parse({"model_type": "llama", "vocab_size": classes, **sizes, **heads})


def planned(
    classes: int, rows: int, mesh: Mesh, shards: Sharding | None = None, free: bool = False
) -> Forecast | None:
    """The planner's step on a mesh; None where nothing fits. free: blocks may share rows."""
    request = PlanRequest(
        rows, SEQUENCE, Precision.named("float32"), AdamW(), documents=(0, SEQUENCE), mesh=mesh,
        shards=shards, budget=MEMORY, settings=NONE.having({"overlap": 0}),
    )  # fmt: skip
    if not free:
        closed = request.settings.having({"blocks_by_rows": 0})
        request = replace(request, settings=closed)
    try:
        return choose(model(classes), request, catalogue("V100-SXM2-16", DEVICES))
    except OutsizeError:
        return None


def told(made: Forecast | None) -> str:
    return "fits not" if made is None else f"{made.seconds:.3f} s, {format_bytes(made.peak)}"


def gain(classes: int, rows: int) -> float:
    """Of the planner's mixture over the best pure strategy that fits."""
    whole, cut = Mesh(data=DEVICES), Mesh(tensor=DEVICES)
    pure = {
        "data": planned(classes, rows, whole, Sharding()),
        "data, sharded": planned(classes, rows, whole, zero(1, DEVICES)),
        "tensor": planned(classes, rows, cut),
    }
    ours = planned(classes, rows, cut, free=True)
    assert ours is not None, "what fits where all is cut, fits"
    said = ", ".join(f"{name} {told(made)}" for name, made in pure.items())
    print(
        f"  (simulated) {classes} classes, {rows} rows: {told(ours)} with {ours.plan.by_rows}"
        f" blocks by rows; {said}"
    )
    return min(made.seconds for made in pure.values() if made is not None) / ours.seconds


def main() -> None:
    right, holds = conversions(), exact()
    few, many = ([gain(classes, rows) for classes in CLASSES] for rows in (FEW, MANY))
    conclude(
        'Yuan et al., "OneFlow", 2021',
        "conversions of layouts cost what the layouts say, and plans of several layouts train what"
        " one strategy cannot, or trains more slowly",
        f"(run) {right} of {len(CONVERSIONS)} conversions; (simulated) {min(few):.2f} to"
        f" {max(few):.2f} times the best pure strategy that fits with {FEW * SEQUENCE:,} features a"
        f" step, {min(many):.2f} to {max(many):.2f} with {MANY * SEQUENCE:,}, where a loss over cut"
        " classes takes longer",
        f"{DEVICES} V100 of 16 GB, 12 blocks of 512 features before {CLASSES[0]:,} to"
        f" {CLASSES[-1]:,} classes, rows of {SEQUENCE} tokens, float32 at 15.7 TFLOP/s",
        Figure(
            "conversions whose bytes are those of their layouts", right, len(CONVERSIONS), "", 0.0
        ),
        Figure("speed over the best pure strategy, least", min(few), None, how="simulated"),
        Figure("speed over the best pure strategy, most", max(few), None, how="simulated"),
        Figure(
            f"speed over the best with {MANY * SEQUENCE:,} features a step, most",
            max(many),
            None,
            how="simulated",
        ),
        holds={f"{DRAWN} drawn plans with shared rows are exact": holds},
    )


if __name__ == "__main__":
    main()
