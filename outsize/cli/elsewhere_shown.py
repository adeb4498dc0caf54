"""What `outsize plan --hardware` prints: tables for people, or one JSON object."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import click

from outsize.foresight.layout import Layout, Resting
from outsize.foresight.memory import Memory, workers
from outsize.foresight.planning.asked import Asked, value_of
from outsize.foresight.planning.choose import Choice, Planned
from outsize.foresight.planning.explain import (
    RESOURCES,
    Change,
    Family,
    Figure,
    by_resource,
    changes,
    families,
    figures,
    loss,
)
from outsize.foresight.planning.written import mesh_said
from outsize.foresight.resting import usable
from outsize.foresight.shape import Shape
from outsize.hardware import Cluster

MFU = "3 (2 N + scores with a causal mask) operations a token, N without the embedding"
COUNTED = "operations of products and attention, as a rehearsal counts them forward and back"


@dataclass(frozen=True)
class Answer:
    """What was asked, and what was found. cost: of the whole run, as far as it is known."""

    shape: Shape
    asked: Asked
    cluster: Cluster
    made: Choice
    cost: Mapping[str, float]

    @property
    def best(self) -> Planned:
        return self.made.plans[0]

    @property
    def mfu(self) -> str:
        """Its formula."""
        return MFU if self.shape.module is None else COUNTED


@dataclass(frozen=True)
class Why:
    """Of the chosen plan."""

    families: tuple[Family, ...]
    changes: tuple[Change, ...]
    figures: tuple[Figure, ...]

    @staticmethod
    def of(answer: Answer) -> Why:
        four = answer.shape, answer.asked, answer.cluster, answer.best
        return Why(
            tuple(families(*four)),
            tuple(changes(*four)),
            tuple(figures(answer.shape, answer.cluster, answer.best)),
        )


def show(answer: Answer, explain: bool, as_json: bool) -> None:
    import json

    why = Why.of(answer) if explain else None
    if as_json:
        click.echo(json.dumps(_as_json(answer, why), indent=2))
        return
    _print(answer)
    if why is not None:
        _print_why(answer, why)


# -- words -----------------------------------------------------------------------------------------


def zero_said(lay: Layout) -> str:
    """The stage of ZeRO, and over how many where these are not all copies."""
    zero, over = value_of(lay, "zero"), value_of(lay, "shards")
    return f"{zero}" if over in (1, lay.data * lay.context) else f"{zero} over {over}"


def recompute_said(shape: Shape, lay: Layout) -> str:
    from outsize.foresight.step import layers_of

    most = int(layers_of(shape.layers, lay.pipeline)[0])
    return f"{lay.whole} of {most}" if lay.whole else lay.recompute


def layout_said(lay: Layout) -> str:
    recompute = value_of(lay, "recompute")
    said = f"{mesh_said(lay)}, zero {zero_said(lay)}, rows {lay.rows}, recompute {recompute}"
    return f"{said}, {resting_said(lay)}" if lay.resting != Resting() else said


def resting_said(lay: Layout) -> str:
    """What rests below the device, and where."""
    at = lay.resting
    graded = "weights" if at.weights else "gradients" if at.gradients else "optimizer"
    gradients = at.summed if at.layers else at.gradients  # else they are where weights are
    kinds = (
        ("weights", at.weights), ("gradients", gradients), ("optimizer", at.optimizer),
        ("activations", at.activations),
    )  # fmt: skip
    found = []
    for kind, tier in kinds:
        of = f" of {at.layers} blocks" if at.layers and kind == graded else ""
        found += [f"{kind}{of} on {tier}"] if tier else []
    if at.host:
        found.append(f"of {at.host} parts of an update {at.over} on the device")
    return ", ".join(found)


def bytes_of(held: Memory) -> dict[str, float]:
    """By kind, with the reserves that are kept."""
    return {
        **held.states,
        "activations": held.activations,
        "head": held.head,
        "gathered": held.gathered,
        "fragmentation": held.reserved - held.tensors,
        "libraries": held.kept.libraries,
        "communicators": held.kept.communicator * held.axes,
    }


def _resource(lane: str) -> str:
    return next((name for name, lanes in RESOURCES.items() if lane in lanes), "")


# -- JSON ------------------------------------------------------------------------------------------


def _as_json(answer: Answer, why: Why | None) -> dict[str, Any]:
    made, asked = answer.made, answer.asked
    found: dict[str, Any] = {
        "sequence": asked.sequence,
        "rows": asked.batch,
        "devices": answer.cluster.count,
        "device": answer.cluster.groups[0].device.name,
        "document_tokens": asked.lengths.seen or asked.sequence,
        "filled": asked.lengths.filled,
        "objective": asked.objective,
        "conditions": asked.conditions.said(),
        "counted": made.counted,
        "fitting": made.fitting,
        "bounded": made.shut,
        "finished": made.finished,
        "mfu_formula": answer.mfu,
        **answer.cost,
        "plans": [_plan_json(answer, each) for each in made.plans],
    }
    if why is not None:
        found["explain"] = {
            "families": [asdict(each) for each in why.families],
            "changes": [
                {"what": each.name, "gain": each.gain, "reason": each.reason,
                 "plan": None if each.plan is None else _plan_json(answer, each.plan)}
                for each in why.changes
            ],
            "constants": [asdict(each) for each in why.figures],
        }  # fmt: skip
    return found


def _plan_json(answer: Answer, each: Planned) -> dict[str, Any]:
    lay, off = each.layout, each.high / each.seconds
    return {
        "mesh": mesh_said(lay),
        "devices": lay.devices,
        "microbatch_rows": lay.rows,
        "microbatches": lay.microbatches,
        "recompute": value_of(lay, "recompute"),
        "layers_recomputed": lay.whole,
        "zero": value_of(lay, "zero"),
        "shards": value_of(lay, "shards"),
        "chunks": lay.chunks,
        "sequence_parallel": lay.sequence_parallel,
        "step_seconds": each.seconds,
        "low": each.low,
        "high": each.high,
        "tokens_per_s": each.tokens / each.seconds,
        "mfu": each.mfu,
        "seconds_by_lane": {k: v for k, v in each.lanes.items() if v},
        "interval_by_lane": {k: [v / off, v * off] for k, v in each.lanes.items() if v},
        "seconds_by_resource": by_resource(each.lanes),
        "binds": each.binds,
        "bytes": bytes_of(each.memory),
        "bytes_by_worker": {
            name: bytes_of(held)
            for name, held in workers(answer.shape, lay, each.memory.kept).items()
        },
        "room": each.room,
        "fits": each.fits,
        "only_foretold": lay.foretold_only,
        "resting": asdict(lay.resting),
        "bytes_below": dict(each.memory.below),
        "machines": list(each.machines),
        "seconds_as_numbered": each.given or each.seconds,
        "loses_by": "" if each is answer.best else loss(each, answer.best),
    }


# -- tables ----------------------------------------------------------------------------------------


def _print(answer: Answer) -> None:
    from outsize.memory import format_bytes
    from outsize.screen import FIGURES, console, say, show, table

    out, best = console(), answer.best
    rows = table("mesh", "rows", "recompute", "zero", "chunks", "step", "from", "to", "tokens/s",
                 "MFU", "memory", right=FIGURES)  # fmt: skip
    for each in answer.made.plans:
        lay = each.layout
        rows.add_row(
            mesh_said(lay), str(lay.rows), recompute_said(answer.shape, lay), zero_said(lay),
            str(lay.chunks), f"{each.seconds:.3g} s", f"{each.low:.3g}",
            f"{each.high:.3g}", f"{each.tokens / each.seconds:,.0f}", f"{each.mfu:.1%}",
            format_bytes(int(each.memory.process)),
        )  # fmt: skip
    show(out, rows)
    off = best.high / best.seconds
    lanes = table("lane", "waits for", "seconds", "from", "to", right=slice(2, None))
    for name, value in sorted(best.lanes.items(), key=lambda item: -item[1]):
        if value > best.seconds / 1000:
            figures = (f"{value:.3g}", f"{value / off:.3g}", f"{value * off:.3g}")
            lanes.add_row(name, _resource(name), *figures)
    show(out, lanes, _held(answer))
    say(out, *_said(answer))


def _held(answer: Answer) -> Any:
    """Bytes of the distinct workers: of a pipeline its first, its second and its last stage."""
    from outsize.memory import format_bytes
    from outsize.screen import FIGURES, table

    every = workers(answer.shape, answer.best.layout, answer.best.memory.kept)
    names = list(every)
    shown = [names[0], *([names[1]] if len(names) > 2 else []), *names[1:][-1:]]
    held = table("bytes", *shown, right=FIGURES)
    kinds = [bytes_of(every[name]) for name in shown]
    for kind in kinds[0]:
        if any(of[kind] for of in kinds):
            held.add_row(kind, *(format_bytes(int(of[kind])) if of[kind] else "-" for of in kinds))
    return held


def _said(answer: Answer) -> Iterator[str]:
    from outsize.memory import format_bytes

    made, asked, cluster, best = answer.made, answer.asked, answer.cluster, answer.best
    yield (
        f"{asked.batch} rows of {asked.sequence} tokens a step;"
        f" {best.layout.devices} of {cluster.count} devices ({cluster.groups[0].device.name})"
    )
    if asked.lengths.seen:
        seen, filled = asked.lengths.seen, asked.lengths.filled
        yield f"whole documents fill {filled:.1%} of rows; a token is in one of {seen} in the mean"
    resource = max(by_resource(best.lanes).items(), key=lambda item: item[1])[0]
    cells = f"; {made.shut} meshes with rows are slower by a bound" if made.shut else ""
    yield f"{made.fitting} of {made.counted} layouts fit{cells}"
    yield f"{best.binds} takes longest; most seconds are of {resource}"
    if not made.finished:
        yield f"not all were seen within {asked.seconds:g} s; --seconds gives more"
    yield f"MFU: {answer.mfu}, of the devices' dense peak"
    left = format_bytes(int(best.room - best.memory.process))
    has = cluster.groups[0].device.memory_bytes
    spare = f" ({format_bytes(has - best.room)} of the device are left)" if best.room < has else ""
    yield f"fits: {left} less than {format_bytes(best.room)}{spare}"
    if best.memory.below:
        held = (f"{format_bytes(int(size))} on {tier}" for tier, size in best.memory.below.items())
        yield f"{resting_said(best.layout)}: of each device {', '.join(held)}"
    elif usable(cluster):
        yield f"{', '.join(usable(cluster))}: not needed"
    elif cluster.tiers:
        names = ", ".join(tier.name for tier in cluster.tiers)
        yield f"{names}: not used by this forecast"
    if best.machines:
        order = ", ".join(map(str, best.machines))
        yield (
            f"machines have the ranks in the order {order}: {best.given / best.seconds:.3f} times"
            f" as fast as in turn ({best.given:.3g} s)"
        )
    if best.layout.foretold_only:
        yield f"{best.layout.precision} is foretold only: this runtime has it not"
    if answer.shape.module is not None and answer.shape.module.note:
        yield answer.shape.module.note
    if answer.cost:
        yield cost_said(answer.cost)


def cost_said(cost: Mapping[str, float]) -> str:
    """Of a whole run, in one line."""
    units = {"days": " days", "device_hours": " device-hours", "money": " money", "kwh": " kWh"}
    return "; ".join(f"{value:,.1f}{units[name]}" for name, value in cost.items())


def _print_why(answer: Answer, why: Why) -> None:
    from outsize.screen import console, show, table

    others = table("runner-up", "loses by")
    for each in answer.made.plans[1:]:
        others.add_row(layout_said(each.layout), loss(each, answer.best))
    kinds = table("layouts with", "why not")
    for family in why.families:
        if not family.chosen:
            kinds.add_row(family.name, family.reason)
    changed = table("if there were", "tokens/s", "plan")
    for change in why.changes:
        gain = f"{change.gain:+.1%}" if change.plan else "-"
        plan = layout_said(change.plan.layout) if change.plan else change.reason
        changed.add_row(change.name, gain, plan)
    known = table("constant", "value", "from")
    for figure in why.figures:
        known.add_row(figure.name, figure.value, figure.source)
    show(console(), *([others] if len(answer.made.plans) > 1 else []), kinds, changed, known)
