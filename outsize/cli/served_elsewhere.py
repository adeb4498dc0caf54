"""`outsize plan MODEL --serve --hardware SPEC`: serving on hardware that is not here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from outsize.cli.command import refuse_unused
from outsize.cli.serving import OUTPUT, PROMPT, RATE, Serving, arrivals_of
from outsize.errors import OutsizeError

if TYPE_CHECKING:
    from outsize.cli.elsewhere import Elsewhere
    from outsize.models.coding import Format
    from outsize.serve.elsewhere import Divided, Found
    from outsize.serve.played import Arrival
    from outsize.serve.slo import Slo

_TRAINED = (
    "require", "forbid", "max_devices", "objective", "seconds", "explain", "html", "tokens",
    "price", "watts", "lengths", "sets", "out", "prompt_tokens", "max_tokens", "temperature",
    "top_k", "top_p",
)  # fmt: skip
_HERE = ("host_memory", "disk", "tiers", "workers", "cache", "queue")
PRODUCTS = ("bf16", "fp8")  # of weights as they are multiplied, the first also of those in codes


def show(
    ctx: click.Context, name: str | None, said: Serving, elsewhere: Elsewhere,
    places: Mapping[str, Any], as_json: bool,
) -> None:  # fmt: skip
    """Say how its devices are divided best and what that bears. OutsizeError for what does not fit,
    and for what is not priced."""
    from outsize.foresight.named import shape_of
    from outsize.hardware import parse_spec
    from outsize.memory import parse_bytes
    from outsize.serve.elsewhere import Wanted, divide
    from outsize.serve.room import Wanted as Usual
    from outsize.serve.slo import NONE, parse_slo
    from outsize.serve.traffic import candidates

    refuse_unused(ctx, _TRAINED, "--serve, which has no part of it")
    refuse_unused(ctx, _HERE, "--hardware, for which it is not foretold")
    if name is None:
        raise OutsizeError("no model; expected as `outsize plan llama3-8b --serve --hardware SPEC`")
    spec = elsewhere.hardware or ""
    if "this" in spec.split():
        raise OutsizeError(f"--hardware {spec}: leave it out, and steps are timed on this machine")
    cluster = parse_spec(spec)
    if not cluster.alike:
        raise OutsizeError("--serve plans for like devices alone; expected one kind in --hardware")
    weights = said.weights or PRODUCTS[0]
    codes = None if weights in PRODUCTS else _codes(weights)
    slo, usual = NONE if said.slo is None else parse_slo(said.slo), Usual()
    memory = places["memory"]
    wanted = Wanted(
        weights if codes is None else PRODUCTS[0],
        said.requests or usual.requests, said.step or usual.budget,
        candidates(said.policy, slo), slo, None if memory is None else parse_bytes(memory),
        said.context, _tensor(places["mesh"]), said.step is None, codes,
    )  # fmt: skip
    found = divide(shape_of(name), cluster.groups[0], wanted, partial(_coming, said))
    if as_json:
        _as_json(found)
        return
    _print(f"{name} in {weights}", found, slo, elsewhere.top)


def _codes(weights: str) -> Format:
    """What weights lie in, to be unpacked beside their products."""
    from outsize.models.coding import EIGHTS, HEAD, format_of

    for behind in (HEAD, *EIGHTS):
        if behind in weights:
            raise OutsizeError(
                f"--weights {weights}: {behind} is not priced there; expected"
                f" {', '.join(PRODUCTS)} or a format without it"
            )
    return format_of(weights, "--weights")


def _coming(said: Serving, copies: int) -> Sequence[Arrival]:
    """Requests to each of several copies: of a traffic one in so many, of a rate as many at its
    part of it."""
    if said.traffic is not None:
        return arrivals_of(said, PROMPT + OUTPUT)[::copies]
    rate = RATE if said.rate is None else said.rate
    part = rate / copies if rate > 0 else rate
    return arrivals_of(replace(said, rate=part), PROMPT + OUTPUT)


def _tensor(mesh: str | None) -> int | None:
    """Workers of each copy that are said, as tensor=2."""
    from outsize.collectives import parse_mesh

    if mesh is None:
        return None
    sizes = dict(parse_mesh(mesh).sizes)
    if sizes.keys() - {"tensor"}:
        raise OutsizeError(f"--mesh {mesh}: copies are served on a tensor axis alone there")
    return sizes.get("tensor", 1)


def _print(what: str, found: Found, slo: Slo, top: int) -> None:
    from outsize.memory import format_bytes
    from outsize.serve.traffic import why

    best, *others = found.divided
    made = best.way.outcome
    click.echo(
        f"{what}: {best}; on a device {format_bytes(int(best.weights))} of weights and"
        f" {format_bytes(int(best.cache))} of cache, pages for"
        f" {best.room.pages * best.room.page:,} tokens of each copy"
    )
    click.echo(f"predicted: {made}")
    kept = f"within {slo}: {made.within:.1%} of the requests; " if slo else ""
    click.echo(f"{kept}up to {found.bears:.3g} requests a second in all")
    for other in others[: top - 1]:
        click.echo(f"behind it: {other} ({why(best.way, other.way, slo)})")
    for line in found.left:
        click.echo(f"left out: {line}")
    click.echo(
        "from data sheets: nothing was measured; the processor's part of a step is vLLM's since 0.8"
    )


def _as_json(found: Found) -> None:
    import json
    from dataclasses import asdict

    def told(one: Divided) -> dict[str, Any]:
        return {
            "copies": one.copies, "tensor": one.tensor,
            "bytes": {"weights": int(one.weights), "cache": int(one.cache)},
            "cached_tokens": one.room.pages * one.room.page, "way": asdict(one.way),
        }  # fmt: skip

    made = {
        "most_requests_per_second": found.bears,
        "divisions": [told(one) for one in found.divided], "left_out": list(found.left),
    }  # fmt: skip
    click.echo(json.dumps(made, indent=2))
