"""`outsize generate`: text from a checkpoint or any Hugging Face decoder directory."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from outsize.cli.command import Drawing, Light, adapted, adapters_of, drawing

if TYPE_CHECKING:
    import torch

    from outsize.cli.prompts import Prompts
    from outsize.data import Tokenizer
    from outsize.data.chats import Asked
    from outsize.decode.samplers import Sampling
    from outsize.launch.heartbeat import Heartbeat
    from outsize.models.config import DecoderConfig
    from outsize.serve.files import Limits
    from outsize.serve.model import Model


@click.command(cls=Light)
@click.argument("directory", type=click.Path(path_type=Path))
@click.option("--prompt", default="", help="What the text begins with.")
@click.option(
    "--prompts",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="A prompt a line, or records with a prompt, or chats, which are answered anew at their end"
    " (.jsonl, .json, .csv, .parquet); one line of JSON is printed for each.",
)
@click.option(
    "--template",
    help="What writes prompts as a user's question: own (the model's), a Jinja file, chatml, ...;"
    " left out, texts are read as they stand, and chats are written by the model's own.",
)
@drawing
@adapted
@click.option("--seed", default=0, show_default=True, help="Of the draws.")
@click.option("--stop", multiple=True, metavar="TEXT", help="End before this text; repeatable.")
@click.option("--tokenizer", help="A directory with a tokenizer.json, or bytes.")
@click.option("--no-echo", is_flag=True, help="Print what is new without the prompt.")
@click.option(
    "--weights",
    metavar="FORMAT",
    help="What the blocks' are held as (outsize keys weights); plain: as they lie in the files.",
)
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
    "--timing",
    is_flag=True,
    help="Seconds and most bytes, predicted and measured.",
)
@click.option(
    "--device",
    default="auto",
    show_default=True,
    help="Of each worker: cpu, or the kind of accelerator that there is; auto takes that.",
)
@click.option("--workers", type=int, help="Processes on this machine, each with a run of layers.")
@click.option("--mesh", metavar="AXES", help="Workers on each axis, as pipeline=2,tensor=2.")
@click.option(
    "--overlap",
    metavar="CHUNKS",
    type=click.IntRange(0),
    help="With a tensor axis: sums beside what is computed, of a prompt in so many chunks; those of"
    " a ladder or Kraken model beside its next branch. Left out: a prompt in two halves, where that"
    " is predicted to be quicker; 0: one after the other.",
)
@click.pass_context
def generate(
    ctx: click.Context,
    directory: Path,
    prompt: str,
    prompts: Path | None,
    template: str | None,
    drawn: Drawing,
    seed: int,
    stop: tuple[str, ...],
    tokenizer: str | None,
    no_echo: bool,
    weights: str | None,
    adapters: tuple[str, ...],
    memory: str | None,
    disk: str | None,
    sparse: bool,
    timing: bool,
    device: str,
    workers: int | None,
    mesh: str | None,
    overlap: int | None,
) -> None:
    """Go on from a prompt with the model in DIRECTORY: a run, a checkpoint of one, or any Hugging
    Face decoder. The text appears as it is made. With --memory the model may be larger than that;
    the text is the same. With --mesh or --workers each worker holds its part of the weights, with
    --memory in a budget of its own.

    Workers of several machines are started by torchrun: torchrun ... -m outsize generate DIRECTORY.
    """
    apart = workers is not None or mesh is not None or "RANK" in os.environ
    if apart:
        # Before PyTorch is loaded: threads that spin while others take their turn keep them from it
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from outsize import accelerator
    from outsize.decode.text import check_prompt
    from outsize.errors import OutsizeError
    from outsize.models.coding import asked

    sampling = drawn.sampling(seed)  # refused before anything is read
    check_prompt(prompt)
    if prompt and prompts is not None:
        raise OutsizeError("--prompt and --prompts are given together; expected one of them")
    listed = None if prompts is None else _listed(prompts)
    if memory is None and (disk is not None or sparse):
        raise OutsizeError("--disk and --sparse go with --memory; give --memory SIZE")
    wanted = _Wanted(
        prompt, listed, template, drawn.max_tokens, sampling, stop, tokenizer, not no_echo, timing
    )
    limits = None if memory is None else limits_of(memory, disk, sparse)
    named = adapters_of(adapters)
    if apart or overlap:
        if weights is not None:
            raise OutsizeError("--weights is for one worker; convert the model (outsize convert)")
        _on_workers(ctx, _Mesh(mesh, workers, overlap, limits, device, named), wanted, directory)
    place = accelerator.named(device)  # refused before anything is read
    found, config, text = found_in(directory, tokenizer)
    config = asked(config, weights, "--weights")
    with opened(found, config, limits, place, named) as model:
        wanted.go(model, text, partial(click.echo, nl=False))


def _listed(path: Path) -> Prompts:
    from outsize.cli.prompts import listed

    return listed(path)


@dataclass(frozen=True)
class _Mesh:
    """The workers as they were said, and what goes for all of them."""

    mesh: str | None
    workers: int | None
    overlap: int | None
    limits: Limits | None
    device: str
    adapters: Sequence[tuple[str, float]]


@dataclass(frozen=True)
class _Wanted:
    """What is generated, whatever the model lies on. listed: prompts of a file. template: what
    writes texts, too; None: nothing."""

    prompt: str
    listed: Prompts | None
    template: str | None
    max_tokens: int
    sampling: Sampling
    stop: tuple[str, ...]
    tokenizer: str | None
    echo: bool
    timing: bool

    def go(
        self,
        model: Model,
        text: Tokenizer,
        on_text: Callable[[str], None] | None,
    ) -> None:
        """Generate; on_text None: another worker says it."""
        model.counts = self.timing
        if on_text is not None:
            self._advise(model)
        if self.listed is not None:
            self._all(model, text, self.listed, on_text)
            return
        said = self._said(model, text)
        said(self.prompt, on_text, self._ready if on_text is not None else None)
        if on_text is not None:
            click.echo()
            if self.timing:
                click.echo(model.timing, err=True)

    def _said(self, model: Model, text: Tokenizer) -> Callable[..., str]:
        """What goes on from a prompt, or answers it; gives the new text."""
        own = (self.max_tokens, self.sampling, self.stop)

        def goes_on(one: str, *told: Any) -> str:
            said = model.generate(one, *own, text, *told)
            assert isinstance(said, str)
            return said

        if self.template is None and all(isinstance(one, str) for one in self.listed or ()):
            return goes_on
        from outsize.cli.chat import template_in
        from outsize.cli.prompts import question
        from outsize.serve.talk import Talk

        assert model.words is not None
        template = template_in(model.words, text, self.tokenizer, self.template or "own")
        talk = Talk(model, text, template)

        def answers(one: str | Asked, *told: Any) -> str:
            if isinstance(one, str) and self.template is None:
                return goes_on(one, *told)
            asked = question(one) if isinstance(one, str) else one
            return talk.answer(asked, *own, *told)

        return answers

    def _all(
        self,
        model: Model,
        text: Tokenizer,
        listed: Prompts,
        on_text: Callable[[str], None] | None,
    ) -> None:
        """One after another, the answer to each with it as a line of JSON."""
        goes_on = self._said(model, text)
        for one in listed:
            what = {"prompt": one} if isinstance(one, str) else {"messages": one.messages}
            said = goes_on(one)
            if on_text is not None:
                on_text(json.dumps({**what, "text": said}, ensure_ascii=False) + "\n")

    def _advise(self, model: Model) -> None:
        """Say where texts are read otherwise than the model's run read them."""
        texts = [self.prompt] if self.listed is None else self.listed
        if self.template is not None or not any(isinstance(one, str) for one in texts):
            return
        from outsize.cli.prompts import trained_on_chats

        if model.origin is not None and trained_on_chats(model.origin):
            click.echo(
                "prompts are read as they stand, and this model was trained on chats: --template"
                " own writes them so",
                err=True,
            )

    def _ready(self, plan: str) -> None:
        """Say before the first token the plan, if there is one, and the prompt."""
        if plan:
            click.echo(plan, err=True)
        if self.echo and self.template is None:
            click.echo(self.prompt, nl=False)

    def meet(self, model: Model, first: bool, pulse: Heartbeat) -> None:
        """Generate as one of several workers."""
        assert model.words is not None
        text = tokenizer_in(model.words, self.tokenizer, model.config)
        self.go(model, text, _printing(pulse) if first else None)

    def facts(self) -> dict[str, str]:
        """What all workers must have been asked alike."""
        names = ("prompt", "listed", "template", "max_tokens", "sampling", "stop", "tokenizer")
        return {name: repr(getattr(self, name)) for name in names}


def _on_workers(ctx: click.Context, on: _Mesh, wanted: _Wanted, directory: Path) -> None:
    """Generate on several workers and leave; nothing where there is one."""
    from outsize.plan.settings import NONE
    from outsize.serve.workers import Asked, run_workers, several

    settings = NONE.having({"overlap": on.overlap})
    facts = {**wanted.facts(), "overlap": str(on.overlap)}
    taken = on_each(on.adapters, on.limits)
    asked = Asked(on.mesh, on.workers, facts, on.limits, settings, on.device, taken)
    asked.check()
    if several(asked):
        found = partial(found_in, directory, wanted.tokenizer)
        ctx.exit(run_workers(asked, lambda: found()[0], wanted.meet))


def _printing(pulse: Heartbeat) -> Callable[[str], None]:
    """Prints text; a worker that waits for whoever reads it does not hang."""

    def on_text(text: str) -> None:
        pulse.wait("writing the text")
        click.echo(text, nl=False)
        pulse.go()

    return on_text


def found_in(directory: Path, named: str | None) -> tuple[Path, DecoderConfig, Tokenizer]:
    """Where a model lies, its config and the tokenizer that goes with it, each read once."""
    from outsize.checkpoint.adapters import model_directory, read_config

    if directory.suffix == ".gguf" and directory.is_file():
        from outsize.checkpoint.gguf_model import cached

        if not (into := cached(directory)).is_dir():
            click.echo(f"unpacking {directory} into {into}", err=True)
    found = model_directory(directory)
    config = read_config(found)
    return found, config, tokenizer_in(found, named, config)


def tokenizer_in(found: Path, named: str | None, config: DecoderConfig) -> Tokenizer:
    """The tokenizer that was named, or the model's, if it is one for the model."""
    from outsize.checkpoint.adapters import tokenizer_directory
    from outsize.data.tokenizer import check_vocabulary, open_tokenizer

    text = open_tokenizer(named or str(tokenizer_directory(found)))
    check_vocabulary(text, config.vocab)
    return text


def on_each(
    named: Sequence[tuple[str, float]], limits: Limits | None
) -> tuple[tuple[Path, float], ...]:
    """Where adapters lie that the weights of each of several workers take up. OutsizeError for a
    directory without one, and where weights stay in files."""
    if not named:
        return ()
    from outsize.checkpoint.adapters import described, model_directory
    from outsize.errors import OutsizeError

    if limits is not None:
        raise OutsizeError("--adapter is for weights in memory; merge it (outsize merge) before")
    found = tuple((model_directory(path).resolve(), weight) for path, weight in named)
    for path, _ in found:
        described(path)
    return found


def limits_of(memory: str, disk: str | None, sparse: bool) -> Limits:
    from outsize.memory.sizes import parse_bytes
    from outsize.serve.files import Limits

    return Limits(parse_bytes(memory), disk, sparse)


def opened(
    found: Path,
    config: DecoderConfig,
    limits: Limits | None,
    device: torch.device,
    named: Sequence[tuple[str, float]] = (),
    dtype: torch.dtype | None = None,
) -> Model:
    """A model on this worker. named: the directories of adapters, and what each counts; dtype: None
    as its files have it."""
    from outsize.checkpoint.bases import beside_others
    from outsize.errors import OutsizeError
    from outsize.serve.model import Model

    for line in beside_others(found, named):
        click.echo(line, err=True)
    if named and limits is not None:
        raise OutsizeError("--adapter is for weights in memory; merge it (outsize merge) before")
    if limits is None:
        from outsize.checkpoint import adapters

        paths = [(adapters.model_directory(path), weight) for path, weight in named]
        return Model(adapters.load(found, dtype, device, config, paths))
    from outsize.checkpoint.hub import describe
    from outsize.checkpoint.whole import check_whole
    from outsize.serve.files import InFiles

    check_whole(found)
    home = InFiles(describe(found, config), limits, dtype, device)
    return Model(home.model, home)
