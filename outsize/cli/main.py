"""`outsize`: the group of commands, and how errors look: one line, exit code 2."""

from __future__ import annotations

import atexit
import errno
import gc
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import click

from outsize.cli.chat import chat
from outsize.cli.convert import convert
from outsize.cli.data import data
from outsize.cli.entry import INTERRUPTED, NOTHING, begun
from outsize.cli.evaluate import evaluate
from outsize.cli.export import export
from outsize.cli.formats import formats
from outsize.cli.generate import generate
from outsize.cli.history import history
from outsize.cli.keys import keys
from outsize.cli.merge import merge
from outsize.cli.new import new
from outsize.cli.plan import plan
from outsize.cli.probe import probe
from outsize.cli.rehearse import rehearse
from outsize.cli.schedule import schedule
from outsize.cli.score import score
from outsize.cli.serve import serve
from outsize.cli.trace import trace
from outsize.cli.train import train
from outsize.cli.verify import verify
from outsize.errors import OutsizeError

# Imports and plans are half a million objects that stay: Python's own bounds look them through
# hundreds of times, a tenth of what a command takes to start.
COLLECT = (50_000, 20, 100)


class _Group(click.Group):
    def make_context(
        self,
        info_name: str | None,
        args: list[str],
        parent: click.Context | None = None,
        **extra: Any,
    ) -> click.Context:
        with _one_line() if args else nullcontext():  # --help and --version print here
            return super().make_context(info_name, args, parent, **extra)

    def invoke(self, ctx: click.Context) -> Any:
        with _one_line():
            begun()
            gc.set_threshold(*COLLECT)
            atexit.register(gc.freeze)  # or Python looks them all through again before it leaves
            return super().invoke(ctx)


@contextmanager
def _one_line() -> Iterator[None]:
    """What a user can mend is told in a line, and the command exits with code 2."""
    try:
        yield
        return
    except OutsizeError as error:
        message = str(error)
    except click.NoSuchOption as error:
        message = f"{error.format_message()}{_ours(error.option_name)}"
    except click.UsageError as error:
        message = error.format_message()
    except OSError as error:  # of what is printed, where that goes to a file
        if error.errno != errno.ENOSPC:
            raise
        message = f"{error.strerror}, where output or a file goes; free some space there"
    except KeyboardInterrupt:
        click.echo(NOTHING, err=True)
        raise click.exceptions.Exit(INTERRUPTED) from None
    click.echo(f"error: {' '.join(message.split())}", err=True)
    raise click.exceptions.Exit(2)


def _ours(option: str) -> str:
    """What an option of another trainer is here."""
    from outsize.train.other_trainers import here

    ours = here(option)
    return "" if ours is None else f" Here it is {ours}."


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="outsize")
def main() -> None:
    """Train and serve models that are larger than the hardware."""


_MODELS = (new, train, generate, chat, serve, evaluate, convert, merge, formats, export)
for command in (
    *_MODELS,
    data,
    plan,
    probe,
    history,
    rehearse,
    score,
    keys,
    schedule,
    trace,
    verify,
):
    main.add_command(command)
