"""A Plan as YAML and as an explanation; reading refuses what it does not know."""

from __future__ import annotations

from collections.abc import Iterator

from outsize.errors import counted
from outsize.plan.plan import BYTES, DEVICE, Plan
from outsize.registry import TECHNIQUES
from outsize.typed import dump_yaml, load_yaml, plain, read


def to_yaml(plan: Plan) -> str:
    """A plan as YAML; `from_yaml` gives back an equal plan."""
    return dump_yaml(plain(plan))


def from_yaml(text: str) -> Plan:
    """Read a plan, refusing unknown keys, wrong types and what a Plan refuses."""
    plan: Plan = read(Plan, load_yaml(text, "plan"), "plan")
    return plan


def explain(plan: Plan) -> list[tuple[str, str, str]]:
    """Rows of (what, value, what it means) that tell what a plan does."""
    precision = plan.precision
    rows = [
        ("stages", str(len(plan.stages)), f"runs of the model's {plan.segments} segments"),
        (
            "microbatches",
            str(plan.microbatches),
            f"{counted(plan.rows, 'row')} a step, {plan.microbatch_rows} at a time; gradients add"
            " up",
        ),
        (
            "precision",
            precision.name,
            f"master {precision.master or 'none: parameters are their own'}, gradients"
            f" {precision.gradients}, optimizer {precision.optimizer}: {_bytes(plan)}",
        ),
        ("recompute", _recompute(plan), "computed again in the backward pass instead of kept"),
        ("loss chunk", _tokens(plan.loss_chunk), "tokens whose logits exist at once"),
        ("MLP tile", _tokens(plan.mlp_tile), "tokens whose feed-forward activations exist at once"),
    ]
    for one, value in plan.settings.every():
        rows.append((one.name.replace("_", " "), f"{value:,}", one.meaning.partition(";")[0]))
    rows.extend(_spread(plan))
    rows.extend(_below(plan))
    if plan.split_backward:
        rows.append(("split backward", "yes", "weight gradients after input gradients"))
    if plan.budget is not None:
        rows.append(("budget", f"{plan.budget:,} bytes", "of the device tier; more is refused"))
    rows.extend(("approximate", name, "changes the maths, as asked") for name in plan.approximate)
    return rows


def _bytes(plan: Plan) -> str:
    """What a parameter takes with its states."""
    precision = plan.precision
    held = BYTES[precision.compute] + BYTES[precision.gradients]
    held += BYTES[precision.master] if precision.master else 0
    for name in plan.approximate:
        one = TECHNIQUES.find(name)
        if one is not None and "optimizer states" in one.touches:
            return f"{held} bytes a parameter beside the states of {name}"
    return f"{held + 2 * BYTES[precision.optimizer]} bytes a parameter with two moments"


def _tokens(count: int) -> str:
    return f"{count:,}" if count else "all"


def _rows(plan: Plan) -> str:
    """Of a step, that each worker takes."""
    if plan.row_shares:
        return f"its share ({', '.join(map(str, plan.row_shares))}) of the {plan.rows} rows"
    return counted(plan.own_rows, "row") if plan.mesh.rows > 1 else "all rows"


def _spread(plan: Plan) -> Iterator[tuple[str, str, str]]:
    """What the workers share and how."""
    mesh, shards = plan.mesh, plan.shards
    if mesh.size > 1:
        yield "workers", str(mesh.size), f"{mesh}; each takes {_rows(plan)} of a step"
    if mesh.data > 1:
        cut = f"{shards.parameters}, {shards.gradients}, {shards.optimizer}"
        yield "shards", cut, "workers over which parameters, gradients, optimizer states are cut"
    if plan.sequence_parallel:
        yield "sequence parallel", "yes", "between branches, tokens are cut over the tensor axis"
    if mesh.pipeline > 1:
        yield "pipeline", plan.pipeline.schedule, f"order in which {mesh.pipeline} workers go on"
        if plan.pipeline.ends is not None:
            name, variant = plan.pipeline.ends
            yield (
                name,
                f"variant {variant}",
                "every worker has rows of the embedding and of the head",
            )
        cuts = ", ".join(map(str, plan.pipeline.cuts)) or "even"
        yield "cuts", cuts, "the stages at which the pipeline's second, third, ... begins"


def _below(plan: Plan) -> Iterator[tuple[str, str, str]]:
    """What rests below the device tier, and how it passes."""
    streams = False
    for kind in ("parameters", "gradients", "optimizer", "activations"):
        tiers = [getattr(stage.rest, kind) for stage in plan.stages]
        for tier in dict.fromkeys(tier for tier in tiers if tier != DEVICE):
            streams = True
            count = tiers.count(tier)
            yield kind, f"{tier}, {count} of {counted(len(tiers), 'stage')}", "there between uses"
    if streams:
        stream = plan.stream
        yield (
            "stream",
            counted(stream.resident, "stage"),
            f"at once, {stream.returned} given back a time",
        )
        yield (
            "order",
            plan.order,
            "a stage's microbatches follow one another, or a microbatch's stages",
        )
        yield "update", plan.update, "of all stages at the end, or of each behind its backward pass"


def _recompute(plan: Plan) -> str:
    counts: dict[str, int] = {}
    for stage in plan.stages:
        name = "+".join(stage.recompute)
        if name:
            counts[name] = counts.get(name, 0) + stage.last - stage.first
    return (
        ", ".join(f"{name} of {counted(count, 'block')}" for name, count in counts.items())
        or "nothing"
    )
