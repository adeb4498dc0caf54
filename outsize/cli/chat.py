"""`outsize chat`: a conversation in the terminal."""

from __future__ import annotations

import signal
import sys
import threading
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from outsize.cli.command import Drawing, Light, adapted, adapters_of, drawing

if TYPE_CHECKING:
    from outsize.data import Tokenizer
    from outsize.data.template import Template
    from outsize.decode.samplers import Sampling
    from outsize.serve.talk import Talk

HELP = "/clear begins anew, /system TEXT sets what the model is told first, /exit or Ctrl-D ends"


@click.command(cls=Light)
@click.argument("directory", type=click.Path(path_type=Path))
@drawing
@click.option("--seed", default=0, show_default=True, help="Of the draws.")
@click.option("--system", default="", help="What the model is told first.")
@click.option("--template", default="own", help="own, a file of Jinja, chatml, llama3, plain, ...")
@click.option("--tokenizer", help="A directory with a tokenizer.json, or bytes.")
@adapted
@click.option("--weights", metavar="FORMAT", help="Hold the blocks' matrices in this format.")
@click.option("--memory", metavar="SIZE", help="Most bytes of tensors, as 2GiB.")
@click.option("--device", default="auto", show_default=True, help="cpu, or an accelerator.")
def chat(
    directory: Path,
    drawn: Drawing,
    seed: int,
    system: str,
    template: str,
    tokenizer: str | None,
    weights: str | None,
    adapters: tuple[str, ...],
    memory: str | None,
    device: str,
) -> None:
    """Talk with the model in DIRECTORY: a run, a checkpoint, an adapter's directory, any Hugging
    Face decoder. Its chat template writes the conversation; Ctrl-C breaks an answer off.
    """
    from outsize import accelerator
    from outsize.cli.generate import found_in, limits_of, opened
    from outsize.models.coding import asked
    from outsize.serve.talk import Talk

    sampling = drawn.sampling(seed)
    place = accelerator.named(device)
    found, config, text = found_in(directory, tokenizer)
    own = template_in(found, text, tokenizer, template)
    limits = None if memory is None else limits_of(memory, None, False)
    config = asked(config, weights, "--weights")
    with opened(found, config, limits, place, adapters_of(adapters)) as model:
        talk = Talk(model, text, own)
        _system(talk, system)
        if sys.stdin.isatty():
            import readline  # noqa: F401  lines that can be edited

            click.echo(HELP, err=True)
        while (words := _read()) is not None:
            if not _command(talk, words):
                _answered(talk, words, drawn, sampling)


def template_in(found: Path, text: Tokenizer, tokenizer: str | None, name: str) -> Template:
    """The template of a model, or the one of a name. OutsizeError where there is none."""
    from outsize.checkpoint.adapters import tokenizer_directory
    from outsize.data.template import NAMED, template_of
    from outsize.errors import OutsizeError

    folder = tokenizer or str(tokenizer_directory(found))
    own = template_of(None if folder == "bytes" else folder, text, name)
    if own is None:
        raise OutsizeError(
            f"{folder} has no chat template (chat_template.jinja, or chat_template in"
            f" tokenizer_config.json); give --template, one of {', '.join(NAMED)} or a file"
        )
    return own


def _read() -> str | None:
    """A line that says something; None at the end."""
    while True:
        try:
            words = input("> " if sys.stdin.isatty() else "").strip()
        except EOFError:
            if sys.stdin.isatty():
                click.echo()
            return None
        except KeyboardInterrupt:
            click.echo()
            return None
        if words in ("/exit", "/quit"):
            return None
        if words:
            return words


def _command(talk: Talk, words: str) -> bool:
    """Carry out what is no message."""
    name, _, rest = words.partition(" ")
    if name == "/clear":
        talk.messages = [one for one in talk.messages if one["role"] == "system"]
    elif name == "/system":
        _system(talk, rest.strip())
    elif words.startswith("/"):
        click.echo(f"{name}: {HELP}", err=True)
    else:
        return False
    return True


def _system(talk: Talk, words: str) -> None:
    rest = [one for one in talk.messages if one["role"] != "system"]
    talk.messages = [{"role": "system", "content": words}, *rest] if words else rest


def _answered(talk: Talk, words: str, drawn: Drawing, sampling: Sampling) -> None:
    """Print an answer as it comes; what is refused is said, and the conversation goes on."""
    from outsize.errors import OutsizeError

    asked = threading.Event()
    before = signal.signal(signal.SIGINT, lambda *_: asked.set())
    try:
        write = partial(click.echo, nl=False)
        full = talk.say(words, drawn.max_tokens, sampling, write, asked.is_set)
        click.echo()
        if full:
            click.echo(f"the context of {talk.model.config.positions} tokens is full", err=True)
    except OutsizeError as error:
        click.echo(f"error: {error}", err=True)
    finally:
        signal.signal(signal.SIGINT, before)
