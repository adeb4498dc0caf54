"""`outsize generate`: text from a checkpoint or any Hugging Face decoder directory."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from outsize.models.decoder import Decoder
    from outsize.runtime.streamed import Streamed


@click.command()
@click.argument("directory", type=click.Path(path_type=Path))
@click.option("--prompt", default="", help="What the text begins with.")
@click.option("--max-tokens", default=200, show_default=True, help="Most tokens to add.")
@click.option("--temperature", default=0.0, show_default=True, help="0: the likeliest token.")
@click.option("--top-k", type=int, help="Draw from so many of the likeliest tokens.")
@click.option("--top-p", default=1.0, show_default=True, help="Draw from so much probability.")
@click.option("--seed", default=0, show_default=True, help="Of the draws.")
@click.option("--stop", multiple=True, metavar="TEXT", help="End before this text; repeatable.")
@click.option("--tokenizer", help="A directory with a tokenizer.json, or bytes.")
@click.option("--no-echo", is_flag=True, help="Print what is new without the prompt.")
@click.option(
    "--memory",
    metavar="SIZE",
    help="Most bytes of tensors, as 2GiB: weights, keys and values, activations. Weights beyond it"
    " are read from DIRECTORY as they are needed. Python and PyTorch come on top.",
)
@click.option(
    "--disk",
    metavar="DIR",
    help="With --memory: where weights that must be converted go (those that rest transposed);"
    " by default the folder for temporary files.",
)
@click.option(
    "--sparse",
    is_flag=True,
    help="With --memory: keep the weights of a pruned model under --disk without their zeros.",
)
@click.option(
    "--timing", is_flag=True, help="With --memory: seconds a token, foretold and measured."
)
def generate(
    directory: Path,
    prompt: str,
    max_tokens: int,
    temperature: float,
    top_k: int | None,
    top_p: float,
    seed: int,
    stop: tuple[str, ...],
    tokenizer: str | None,
    no_echo: bool,
    memory: str | None,
    disk: str | None,
    sparse: bool,
    timing: bool,
) -> None:
    """Go on from a prompt with the model in DIRECTORY: a run, a checkpoint of one, or any Hugging
    Face decoder. The text appears as it is made. With --memory the model may be larger than that;
    the text is the same."""
    from outsize.api import generate as go_on
    from outsize.checkpoint import hub
    from outsize.data import check_vocabulary, open_tokenizer
    from outsize.decode.samplers import Sampling
    from outsize.errors import OutsizeError
    from outsize.train.directory import model_directory

    Sampling(temperature, top_k, top_p, seed)  # refused before anything is read
    if memory is None and (disk is not None or sparse or timing):
        raise OutsizeError("--disk, --sparse and --timing go with --memory; give --memory SIZE")
    found = model_directory(directory)
    text = open_tokenizer(tokenizer or str(found))
    check_vocabulary(text, hub.read_config(found).vocab)
    with ExitStack() as stack:
        model = _opened(stack, found, memory, disk, sparse)
        on_ready = _echo(prompt, no_echo)
        go_on(
            model,
            prompt,
            max_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            seed=seed,
            stop=stop,
            tokenizer=text,
            on_text=lambda piece: click.echo(piece, nl=False),
            on_ready=on_ready,
        )
        click.echo()
        if timing:
            click.echo(_timing(model), err=True)


def _opened(
    stack: ExitStack, found: Path, memory: str | None, disk: str | None, sparse: bool
) -> Decoder | Streamed:
    from outsize.checkpoint import hub
    from outsize.memory import parse_bytes
    from outsize.runtime.streamed import Streamed

    if memory is None:
        return hub.load(found)
    return stack.enter_context(Streamed(found, parse_bytes(memory), disk=disk, sparse=sparse))


def _echo(prompt: str, no_echo: bool) -> Callable[[str], None]:
    """What is said before the first token: the plan, if there is one, and the prompt."""

    def on_ready(plan: str) -> None:
        if plan:
            click.echo(plan, err=True)
        if not no_echo:
            click.echo(prompt, nl=False)

    return on_ready


def _timing(model: Decoder | Streamed) -> str:
    from outsize.runtime.streamed import Streamed

    assert isinstance(model, Streamed)
    return model.timing()
