"""`outsize plan DIR --serve`: what serving would hold, take and bear, before anything is read."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from outsize.memory.tiers import TierSpec
    from outsize.serve.advice import Advice
    from outsize.serve.asks import Room
    from outsize.serve.played import Arrival
    from outsize.serve.room import Served, Wanted
    from outsize.serve.slo import Slo
    from outsize.serve.traffic import Way

RATE, PROMPT, OUTPUT = 1.0, 512, 128  # where nothing is said


@dataclass(frozen=True)
class Serving:
    """What is said of serving."""

    serve: bool
    traffic: Path | None
    rate: float | None
    prompt: int | None
    output: int | None
    slo: str | None
    policy: str | None
    weights: str | None
    cache: str | None
    context: int | None
    requests: int | None
    step: int | None
    queue: int | None

    def wanted(self, slo: Slo, below: tuple[TierSpec, ...]) -> Wanted:
        """What is left out is as `outsize serve` has it. below: where pages go that are pushed
        out."""
        from outsize.serve.room import Wanted

        usual = Wanted()
        requests, step = self.requests or usual.requests, self.step or usual.budget
        cache = self.cache or usual.cache
        return Wanted(self.context, requests, step, self.queue, slo=slo, cache=cache, below=below)


_SERVING = (
    click.option("--serve", is_flag=True, help="Predict `outsize serve` instead, for the requests"
                 " that the next options say."),
    click.option("--traffic", type=click.Path(path_type=Path), metavar="FILE", help="Requests: a"
                 ' line {"at": SECONDS, "prompt": TOKENS, "output": TOKENS} each.'),
    click.option("--rate", type=float, help=f"Requests a second, by chance; {RATE:g} by default."),
    click.option("--prompt", type=int, help=f"Tokens of their prompts; {PROMPT} by default."),
    click.option("--output", type=int, help=f"Tokens that each draws; {OUTPUT} by default."),
    click.option("--slo", metavar="SLO", help="What is promised, as ttft=500ms,tpot=50ms."),
    click.option("--policy", help="As of `outsize serve`; the best of all by default."),
    click.option("--weights", metavar="FORMAT", help="As of `outsize serve`, like those below."),
    click.option("--cache", metavar="FORM"),
    click.option("--context", type=click.IntRange(1), metavar="TOKENS"),
    click.option("--requests", type=click.IntRange(1, 1024)),
    click.option("--step", type=click.IntRange(1), metavar="TOKENS"),
    click.option("--queue", type=click.IntRange(0), metavar="TOKENS"),
)  # fmt: skip
NAMES = tuple(one.name for one in fields(Serving))


def serving(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command options that say what is served to whom, as `served`: a Serving."""

    @functools.wraps(command)
    def call(*args: Any, **options: Any) -> None:
        own = {name: options.pop(name) for name in NAMES}
        command(*args, served=Serving(**own), **options)

    for option in reversed(_SERVING):
        call = option(call)
    return call


def show(name: str | None, said: Serving, places: Mapping[str, Any], as_json: bool) -> None:
    """Say what it would be like. places: memory and tiers, mesh or workers. OutsizeError for what
    does not fit, and for values that are none."""
    from outsize.serve.advice import advice
    from outsize.serve.slo import NONE, parse_slo
    from outsize.serve.traffic import candidates, check, most, ways, why

    slo = NONE if said.slo is None else parse_slo(said.slo)
    policies, arrivals = candidates(said.policy, slo), arrivals_of(said, PROMPT + OUTPUT)
    plan = _planned(name, said, slo, places)
    if said.traffic is None:
        arrivals = arrivals_of(said, plan.room.context)
    check(arrivals, plan.room)
    tried = ways(plan.room, arrivals, policies, said.step is None)
    best = _whole(plan.room, arrivals, tried[0])
    bears = most(plan.room, arrivals, best)
    worth = advice(plan.room, plan.weights, plan.cache, arrivals)
    if as_json:
        _as_json(plan, arrivals, [best, *tried[1:]], bears, worth)
        return
    _print(plan, arrivals, best, bears)
    click.echo(worth)
    if len(tried) > 1:
        click.echo(f"next best: {tried[1]} ({why(tried[0], tried[1], slo)})")


def _planned(name: str | None, said: Serving, slo: Slo, places: Mapping[str, Any]) -> Served:
    import torch

    from outsize.errors import OutsizeError
    from outsize.memory import parse_bytes
    from outsize.memory.tiers import disk_tier, host_tier
    from outsize.serve.forecast import described
    from outsize.serve.planned import planned
    from outsize.serve.workers import Asked
    from outsize.train.resolve import is_file, values_of

    mesh = Asked(places["mesh"], places["workers"], {}).mesh_of()
    if mesh.size > 1 and said.weights is not None:
        raise OutsizeError("--weights is for one worker; convert the model before")
    memory, kept, disk = (places[one] for one in ("memory", "host_memory", "disk"))
    below = [] if kept is None else [host_tier(kept)]
    below += [] if disk is None else [disk_tier(disk)]
    if name is None or is_file(name):
        name = str(values_of(name).get("model.name"))
    coded, dtype = (None, torch.bfloat16) if said.weights == "bf16" else (said.weights, None)
    wanted, limit = said.wanted(slo, tuple(below)), None if memory is None else parse_bytes(memory)
    return planned(described(name, coded), wanted, limit, mesh, dtype)


def arrivals_of(said: Serving, context: int) -> list[Arrival]:
    """context: tokens that a request may have, by which what is not said may be less."""
    from outsize.errors import OutsizeError
    from outsize.serve.traffic import steady, traffic_in

    if said.traffic is None:
        rate = RATE if said.rate is None else said.rate
        output = min(OUTPUT, context // 4) if said.output is None else said.output
        prompt = min(PROMPT, context - output) if said.prompt is None else said.prompt
        return steady(rate, prompt, output)
    for name in ("rate", "prompt", "output"):
        if getattr(said, name) is not None:
            raise OutsizeError(f"--{name} is given beside --traffic, which says it; leave one out")
    return traffic_in(said.traffic)


def _whole(room: Room, arrivals: list[Arrival], way: Way) -> Way:
    """Of all requests, not some."""
    from dataclasses import replace

    from outsize.serve.played import play
    from outsize.serve.policies import chosen
    from outsize.serve.traffic import outcome

    played = play(replace(room, budget=way.budget), chosen(way.policy, room.slo), arrivals)
    return replace(way, outcome=outcome(played, room.slo))


def _at_once(room: Room, arrivals: list[Arrival]) -> int:
    """How many of these requests, on average, go at once."""
    mean = sum(one.prompt + one.new for one in arrivals) / len(arrivals)
    return min(room.slots, int(room.pages * room.page / mean))


def _print(plan: Served, arrivals: list[Arrival], best: Way, bears: float) -> None:
    from outsize.errors import counted

    found, slo = best.outcome, plan.room.slo
    for line in plan.lines():
        click.echo(line)
    click.echo(
        f"predicted for {counted(len(arrivals), 'request', ',')}, up to"
        f" {_at_once(plan.room, arrivals)} of them at once, {best}: {found};"
        f" {found.rate:.3g} requests and {found.tokens:,.0f} new tokens a second"
    )
    if slo:
        click.echo(
            f"within {slo}: {found.within:.1%} of the requests, {found.refused:,} refused; up to"
            f" {bears:.3g} requests a second with 99% of first and further tokens in time"
        )
    else:
        click.echo(f"up to {bears:.3g} requests a second")


def _as_json(
    plan: Served, arrivals: list[Arrival], tried: list[Way], bears: float, worth: Advice
) -> None:
    import json
    from dataclasses import asdict

    room = plan.room
    click.echo(
        json.dumps(
            {
                "bytes": {"weights": plan.weights, "cache": plan.cache, "work": plan.work},
                "stages": [
                    dict(zip(("weights", "cache", "work"), one, strict=True)) for one in plan.shares
                ],
                "requests_at_once": _at_once(room, arrivals),
                "notes": plan.notes,
                "most_requests_per_second": bears,
                "worth": asdict(worth),
                "ways": [asdict(one) for one in tried],
            },
            indent=2,
        )
    )
