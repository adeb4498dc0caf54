"""Claim: layouts that trained GPT of 22B, 175B and 1T parameters on Frontier, and how they scale.

Dash et al., "Optimizing Distributed Training on Frontier for Large Language Models", 2023: the best
of a search by hand and by tuning on MI250X, whose every chip (GCD) is a device: 38.38%, 36.14% and
31.96% of its peak; 100% weak scaling on 1,024 and 3,072 devices, 89% and 87% strong scaling.

  choice    the product plans the same models for the same devices; the paper's layout is priced by
            the same forecast, and its step is compared with that of the choice
  forecast  the paper's runs as rows of a table of `outsize score`, nothing measured in them, with
            constants that were fitted without this publication: part of the peak and scaling

The paper's text is not at hand. Shapes and layouts are recalled from it (its tables of models and
of the best parameters): of 22B the shape alone, so that its layout is not compared.
"""

from __future__ import annotations

from dataclasses import replace

from verdict import Figure, conclude

from outsize.foresight.conventions import megatron_2021
from outsize.foresight.planning.asked import Asked, Condition, Conditions
from outsize.foresight.planning.choose import Planned, choose
from outsize.foresight.runs import COLUMNS, read_runs
from outsize.foresight.score import Row, forecasts
from outsize.foresight.shape import Shape
from outsize.hardware import parse_spec

VOCAB, SEQUENCE, PEAK = 51200, 2048, 191.5e12
SHAPES = {"22B": (48, 6144, 48), "175B": (96, 12288, 96), "1T": (128, 25600, 128)}
# Devices, tensor, pipeline, rows of a step: one row a microbatch, blocks computed again, ZeRO 1.
LAYOUTS = {"175B": (1024, 4, 16, 10240), "1T": (3072, 8, 64, 9600)}
TUNED = {"22B": (64, 1024)}  # devices and rows of what is planned where no layout is known
PUBLISHED = {"22B": 0.3838, "175B": 0.3614, "1T": 0.3196}
# Devices of the fewest and of the most, rows of a step: of each copy, and of all in the strong one.
WEAK = {"175B": (128, 1024, 640), "1T": (1024, 3072, 1600)}
STRONG = {"175B": (128, 1024, 8000, 0.8993), "1T": (1024, 3072, 8016, 0.8705)}


def shape(name: str) -> Shape:
    layers, hidden, heads = SHAPES[name]
    return Shape(layers=layers, hidden=hidden, heads=heads, vocab=VOCAB, positions=SEQUENCE)


# -- choice ----------------------------------------------------------------------------------------


def planned(name: str, devices: int, batch: int, **required: int | str) -> Planned:
    said = tuple(Condition(key, "=", value) for key, value in required.items())
    asked = Asked(SEQUENCE, batch, "fp16", Conditions(said), seconds=60)
    cluster = parse_spec(f"{devices // 8} x 8 MI250X-GCD")
    return choose(shape(name), asked, cluster, 1).plans[0]


def said(plan: Planned) -> str:
    lay = plan.layout
    return (
        f"{lay.data} x tensor {lay.tensor} x pipeline {lay.pipeline}, rows {lay.rows}, recompute"
        f" {lay.recompute}, {lay.chunks} chunks: {plan.seconds:.1f} s"
    )


def loss(name: str) -> float:
    """By what the paper's layout is behind the product's choice."""
    devices, tensor, pipeline, rows = LAYOUTS[name]
    best = planned(name, devices, rows)
    theirs = planned(
        name, devices, rows, tensor=tensor, pipeline=pipeline, rows=1, recompute="full", zero=1
    )
    print(f"  (simulated) {name} on {devices}: chosen {said(best)}; the paper's {said(theirs)}")
    return theirs.seconds / best.seconds - 1


# -- forecast --------------------------------------------------------------------------------------


def row(name: str, devices: int, tensor: int, pipeline: int, rows: int) -> Row:
    """A run of the paper, foretold with constants of other publications."""
    layers, hidden, heads = SHAPES[name]
    values = {
        "source": "ORNL Frontier (arXiv:2312.12705)", "model": f"GPT-{name}", "layers": layers,
        "hidden": hidden, "heads": heads, "seq": SEQUENCE, "vocab": VOCAB, "gpus": devices,
        "gpu_type": "MI250X", "tp": tensor, "pp": pipeline, "dp": devices // (tensor * pipeline),
        "micro_batch": 1, "global_batch": rows, "recompute": "full", "precision": "fp16",
        "sharding": "zero1", "measured_metric": "hfu_pct",
    }  # fmt: skip
    lines = (",".join(COLUMNS), ",".join(str(values.get(column, "")) for column in COLUMNS))
    (run,) = read_runs("\n".join(lines), "frontier")
    assert run.layout is not None and not run.missing, run.missing
    run = replace(run, layout=replace(run.layout, attention="flash"))  # its second version
    return forecasts([run], lambda one: one.source.name)[0]


def utilisation(name: str) -> float:
    """Part of the peak as Megatron-DeepSpeed prints it, which counts what is computed again."""
    made = row(name, *LAYOUTS[name])
    tokens = float(LAYOUTS[name][3] * SEQUENCE)
    work = megatron_2021(shape(name), tokens, SEQUENCE, True)
    return work / (made.seconds * PEAK * LAYOUTS[name][0])


def scaling(name: str) -> tuple[float, float]:
    """Weak and strong: speed of a device on the most of them over that on the fewest."""
    _, tensor, pipeline, _ = LAYOUTS[name]
    few, many, each = WEAK[name]
    weak = [
        row(name, n, tensor, pipeline, each * n // (tensor * pipeline)).rate for n in (few, many)
    ]
    few, many, rows, _ = STRONG[name]
    strong = [row(name, n, tensor, pipeline, rows).rate for n in (few, many)]
    return weak[1] / weak[0], strong[1] / strong[0]


def main() -> None:
    figures = []
    for name in LAYOUTS:
        behind = loss(name)
        figures.append(
            Figure(f"{name}: its layout behind ours", behind, 0.03, "%", 1.0, True, "simulated",
                   other="the layout is recalled")
        )  # fmt: skip
    best = planned("22B", *TUNED["22B"])
    print(f"  (simulated) 22B on {TUNED['22B'][0]}: chosen {said(best)}")
    figures.append(Figure("22B: its layout behind ours", None, 0.03, "%", 1.0, True, "simulated"))
    for name in LAYOUTS:
        ours, paper = utilisation(name), PUBLISHED[name]
        print(f"  (simulated) {name}: {ours:.1%} of the peak, published {paper:.1%}")
        figures.append(_near(f"{name}: share of the peak", ours, paper))
    for name in LAYOUTS:
        weak, strong = scaling(name)
        print(f"  (simulated) {name}: weak {weak:.1%}, strong {strong:.1%}")
        figures.append(_near(f"{name}: weak scaling", weak, 1.0))
        figures.append(_near(f"{name}: strong scaling", strong, STRONG[name][3]))
    conclude(
        'Dash et al., "Optimizing Distributed Training on Frontier", 2023',
        "layouts of 22B, 175B and 1T; 38.38%, 36.14%, 31.96% of the peak; 100% weak, 89% and 87%"
        " strong scaling",
        "; ".join(str(figure) for figure in figures),
        "MI250X-GCD from the catalogue; shapes and layouts as recalled, 22B's layout unknown;"
        " constants fitted without this publication, nobody else's runs on these devices are in"
        " the table",
        *figures,
    )


def _near(what: str, ours: float, paper: float) -> Figure:
    """How far a forecast is off: within a tenth is what is asked."""
    return Figure(f"{what} off", abs(ours / paper - 1), 0.10, "%", 1.0, True, "simulated")


if __name__ == "__main__":
    main()
