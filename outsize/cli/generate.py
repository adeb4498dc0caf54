"""`outsize generate`: text from a checkpoint or any Hugging Face decoder directory."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from outsize.data import Tokenizer
    from outsize.models.decoder import Decoder
    from outsize.runtime.streamed import Streamed
    from outsize.serve import Meshed


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
@click.option("--workers", type=int, help="Processes on this machine, each with a run of layers.")
@click.option("--mesh", metavar="AXES", help="Workers on each axis, as pipeline=2,tensor=2.")
@click.pass_context
def generate(
    ctx: click.Context,
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
    workers: int | None,
    mesh: str | None,
) -> None:
    """Go on from a prompt with the model in DIRECTORY: a run, a checkpoint of one, or any Hugging
    Face decoder. The text appears as it is made. With --memory the model may be larger than that;
    the text is the same. With --mesh or --workers each worker holds its part of the weights.

    Workers of several machines are started by torchrun: torchrun ... -m outsize generate DIRECTORY.
    """
    if workers is not None or mesh is not None or "RANK" in os.environ:
        # Before PyTorch is loaded: threads that spin while others take their turn keep them from it
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from outsize.api import generate as go_on
    from outsize.decode.samplers import Sampling
    from outsize.errors import OutsizeError
    from outsize.serve.workers import Asked, run_workers, several
    from outsize.train.directory import model_directory

    sampling = Sampling(temperature, top_k, top_p, seed)  # refused before anything is read
    if memory is None and (disk is not None or sparse or timing):
        raise OutsizeError("--disk, --sparse and --timing go with --memory; give --memory SIZE")
    begun = partial(
        go_on, prompt=prompt, max_tokens=max_tokens, temperature=temperature, top_k=top_k,
        top_p=top_p, seed=seed, stop=stop,
    )  # fmt: skip

    def go(model: Decoder | Streamed | Meshed, first: bool = True) -> None:
        assert model.origin is not None
        text = _tokenizer(model.origin, tokenizer)
        if not first:
            begun(model, tokenizer=text)
            return
        on_text = partial(click.echo, nl=False)
        begun(model, tokenizer=text, on_text=on_text, on_ready=_echo(prompt, no_echo))
        click.echo()

    def find() -> Path:
        found = model_directory(directory)
        _tokenizer(found, tokenizer)
        return found

    facts = {
        "prompt": repr(prompt), "max_tokens": repr(max_tokens), "sampling": repr(sampling),
        "stop": repr(stop), "tokenizer": repr(tokenizer),
    }  # fmt: skip
    asked = Asked(mesh, workers, facts)
    if several(asked):
        if memory is not None:
            raise OutsizeError(
                f"--memory {memory} with several workers, each of which holds its part; leave"
                " --memory out, or --workers and --mesh"
            )
        ctx.exit(run_workers(asked, find, go))
    with ExitStack() as stack:
        model = _opened(stack, find(), memory, disk, sparse)
        go(model)
        if timing:
            click.echo(_timing(model), err=True)


def _tokenizer(found: Path, named: str | None) -> Tokenizer:
    """The tokenizer that was named, or the model's, if it is one for the model."""
    from outsize.checkpoint import hub
    from outsize.data import check_vocabulary, open_tokenizer

    text = open_tokenizer(named or str(found))
    check_vocabulary(text, hub.read_config(found).vocab)
    return text


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
