"""What commands share: errors that name what was typed (`--max-tokens is -3`, not `max_tokens is
-3`), the options that place a run and those that say how tokens are drawn."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from outsize.errors import OutsizeError
from outsize.torch_later import put_off

if TYPE_CHECKING:
    from outsize.decode.samplers import Sampling


class Command(click.Command):
    """Errors that begin with the name of a value that was given as an option begin with the
    option; an option that is given twice and has one value is refused."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        _, _, order = self.make_parser(ctx).parse_args(list(args))
        for one in order:
            once = isinstance(one, click.Option) and not (one.multiple or one.is_flag or one.count)
            if once and sum(other is one for other in order) > 1:
                raise click.UsageError(f"{one.opts[-1]} is given more than once; give it once")
        return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except OutsizeError as error:
            text = _as_typed(str(error), ctx)
            if text == str(error):
                raise
            raise OutsizeError(text) from error


_COMPUTED = ("adapters", "memory", "mesh", "workers")  # on shapes, some of their forms


class Light(Command):
    """Of a model that is there: no plan is made of it, so PyTorch comes without what plans need."""

    def invoke(self, ctx: click.Context) -> Any:
        if not any(ctx.params.get(one) for one in _COMPUTED):
            put_off()
        return super().invoke(ctx)


_PLACES = (
    click.option("--memory", metavar="SIZE", help="Most memory on the device, as 2GiB."),
    click.option("--host-memory", metavar="SIZE", help="RAM beside it where states may rest."),
    click.option(
        "--disk", metavar="DIR[:SIZE]", help="Folder where states may rest; DIR,DIR: both."
    ),
    click.option(
        "--tier",
        "tiers",
        multiple=True,
        metavar="NAME=PATH:SIZE",
        help="Memory with a path, such as CXL, where states may rest; repeatable.",
    ),
    click.option("--workers", type=int, help="Processes of this machine that train together."),
    click.option("--mesh", metavar="AXES", help="Workers on each axis, as data=2,tensor=2."),
)


def placed(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command options that say what a run is spread over, as `places`: values by key."""

    @functools.wraps(command)
    def call(*args: Any, **options: Any) -> None:
        names = ("memory", "host_memory", "disk", "tiers", "workers", "mesh")
        places = {name: options.pop(name) for name in names}
        command(*args, places={**places, "tiers": places["tiers"] or None}, **options)

    for option in reversed(_PLACES):
        call = option(call)
    return call


@dataclass(frozen=True)
class Drawing:
    """How a prompt is gone on with."""

    max_tokens: int
    temperature: float
    top_k: int | None
    top_p: float

    def sampling(self, seed: int = 0) -> Sampling:
        """OutsizeError for numbers that are out of range."""
        from outsize.decode.samplers import Sampling

        return Sampling(self.temperature, self.top_k, self.top_p, seed)


_DRAWING = (
    click.option("--max-tokens", default=200, show_default=True, help="Most tokens to add."),
    click.option("--temperature", default=0.0, show_default=True, help="0: the likeliest token."),
    click.option("--top-k", type=int, help="Draw from so many of the likeliest tokens."),
    click.option("--top-p", default=1.0, show_default=True, help="Draw from so much probability."),
)


def drawing(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command options that say how tokens are drawn, as `drawn`: a Drawing."""

    @functools.wraps(command)
    def call(*args: Any, **options: Any) -> None:
        own = {each.name: options.pop(each.name) for each in fields(Drawing)}
        command(*args, drawn=Drawing(**own), **options)

    for option in reversed(_DRAWING):
        call = option(call)
    return call


adapted = click.option(
    "--adapter",
    "adapters",
    multiple=True,
    metavar="DIR[=WEIGHT]",
    help="An adapter (a run, or a directory of peft's) that the weights take up; repeatable.",
)


def _taken(ctx: click.Context, _: click.Parameter, file: Path | None) -> None:
    """Options of a file are where those of the command line are not."""
    if file is None:
        return
    from outsize.texts import read_text
    from outsize.typed import load_yaml, unknown

    found = load_yaml(read_text(file, "expected options in YAML"), str(file)) or {}
    if not isinstance(found, dict):
        raise OutsizeError(f"{file}: expected options, a line each, as `context: 4096`")
    own = [x for x in ctx.command.params if isinstance(x, click.Option) and x.expose_value]
    names = {x.opts[-1].removeprefix("--"): x for x in own}
    for key, value in found.items():
        if key not in names:
            raise unknown(key, tuple(names), str(file), "")
        if isinstance(value, dict) or isinstance(value, list) != names[key].multiple:
            wanted = "a list" if names[key].multiple else "one value"
            raise OutsizeError(f"{file}: {key} is {value!r}; expected {wanted}")
    ctx.default_map = {names[key].name: value for key, value in found.items()}


optioned = click.option(
    "--options",
    type=click.Path(path_type=Path),
    metavar="FILE",
    is_eager=True,
    expose_value=False,
    callback=_taken,
    help="YAML with any of these options, as `context: 4096`; those that are given here win.",
)


def adapters_of(said: Iterable[str]) -> list[tuple[str, float]]:
    """The directories of adapters, and what each counts. OutsizeError for no number."""
    found = []
    for text in said:
        path, equals, number = text.rpartition("=")
        if Path(text).expanduser().is_dir():  # as runs/lr=1e-4
            equals = number = ""
        try:
            weight = float(number) if equals else 1.0
        except ValueError:
            weight = math.nan
        if not math.isfinite(weight):
            raise OutsizeError(
                f"--adapter {text}: {number!r} is no finite number; expected DIR or DIR=WEIGHT"
            )
        found.append((path if equals else text, weight))
    return found


def refuse_unused(
    ctx: click.Context, names: Iterable[str], beside: str = "", without: str = ""
) -> None:
    """OutsizeError naming the first of these parameters that was given. beside: what makes it say
    nothing, as "--resume, whose run has its own"; without: the option that it goes with."""
    for parameter in ctx.command.params:
        given = ctx.get_parameter_source(parameter.name or "") is ParameterSource.COMMANDLINE
        if given and parameter.name in names:
            option = isinstance(parameter, click.Option)
            what = parameter.opts[-1] if option else f"{ctx.params[parameter.name]}"
            if without:
                raise OutsizeError(f"{what} goes with {without}; add that, or leave {what} out")
            raise OutsizeError(f"{what} is given beside {beside}; leave one of them out")


def _as_typed(text: str, ctx: click.Context) -> str:
    found = re.match(r"(\w+)(?= (is|are|=) )", text)
    if found is None:
        return text
    for parameter in ctx.command.params:
        given = ctx.get_parameter_source(parameter.name or "") is ParameterSource.COMMANDLINE
        if given and isinstance(parameter, click.Option) and parameter.name == found[1]:
            return parameter.opts[-1] + text[found.end() :]
    return text
