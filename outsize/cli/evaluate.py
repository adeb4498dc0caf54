"""`outsize eval`: how well a model says what it has not been trained on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from outsize.cli.command import Command, adapted, adapters_of

if TYPE_CHECKING:
    from outsize.data import Source, Tokenizer
    from outsize.serve.evaluate import Measured
    from outsize.train.config import RunConfig

SEQUENCE = 1024  # tokens that are read at once, where the model has as many positions


@click.command("eval", cls=Command)
@click.argument("directory", type=click.Path(path_type=Path))
@click.option("--on", "files", multiple=True, required=True, metavar="FILE", help="Repeatable.")
@click.option(
    "--set", "sets", multiple=True, metavar="KEY=VALUE", help="A key of data, as in runs."
)
@click.option("--sequence", type=click.IntRange(2), help="Tokens that are read at once.")
@click.option("--tokenizer", help="A directory with a tokenizer.json, or bytes.")
@adapted
@click.option("--weights", metavar="FORMAT", help="Hold the blocks' matrices in this format.")
@click.option("--memory", metavar="SIZE", help="Most bytes of tensors, as 2GiB.")
@click.option("--device", default="auto", show_default=True, help="cpu, or an accelerator.")
@click.option("--json", "as_json", is_flag=True, help="One line of JSON.")
def evaluate(
    directory: Path,
    files: tuple[str, ...],
    sets: tuple[str, ...],
    sequence: int | None,
    tokenizer: str | None,
    weights: str | None,
    adapters: tuple[str, ...],
    memory: str | None,
    device: str,
    as_json: bool,
) -> None:
    """Loss, bits per byte and exact match of the model in DIRECTORY (a run, a checkpoint, an
    adapter's or any Hugging Face decoder's directory) on files of text or of chats. Of a chat only
    the answers count. An answer is matched exactly where greedy generation would give all of it.
    """
    from outsize import accelerator
    from outsize.checkpoint.adapters import tokenizer_directory
    from outsize.cli.generate import found_in, limits_of, opened
    from outsize.models.coding import asked
    from outsize.serve.evaluate import evaluate as measure

    place = accelerator.named(device)
    found, config, text = found_in(directory, tokenizer)
    config = asked(config, weights, "--weights")
    length = sequence or min(SEQUENCE, config.positions)
    run = keys_of(files, sets, length)
    source = _source(run, text, tokenizer or str(tokenizer_directory(found)), length)
    limits = None if memory is None else limits_of(memory, None, False)
    from outsize.data.sources import ReadLog

    log = ReadLog()
    with opened(found, config, limits, place, adapters_of(adapters)) as model:
        documents = source.documents(log)
        got = measure(model, documents, text.start, length, not source.weighed, log)
    if as_json:
        click.echo(json.dumps(_numbers(got, source.weighed)))
        return
    click.echo(_said(got, source.weighed))
    if log.summary() != "nothing skipped":
        click.echo(log.summary(), err=True)


def keys_of(files: tuple[str, ...], sets: tuple[str, ...], sequence: int) -> RunConfig:
    """The keys of data, and what its records say."""
    from outsize.errors import OutsizeError
    from outsize.train import derive
    from outsize.train.resolve import as_sets, resolve

    for one in sets:
        if not one.startswith("data."):
            raise OutsizeError(f"--set {one}: expected a key of data, as data.field=text")
    said = as_sets({"data.path": list(files), "train.sequence": sequence})
    return derive.source(resolve(None, (*said, *sets))).config


def _source(run: RunConfig, text: Tokenizer, named: str, sequence: int) -> Source:
    from dataclasses import replace

    from outsize.data.open import source_of
    from outsize.train.recipe import data_config

    config = replace(data_config(run, named), sequence=sequence)
    return source_of(config, text, config.paths(), 1.0)


def _numbers(got: Measured, answers: bool) -> dict[str, float | int]:
    exact = {"exact_match": got.whole / got.documents} if answers else {}
    return {
        "documents": got.documents, "tokens": got.targets, "loss": got.loss,
        "bits_per_byte": got.bits_per_byte, "right": got.right / got.targets, **exact,
    }  # fmt: skip


def _said(got: Measured, answers: bool) -> str:
    from outsize.errors import counted

    what = counted(got.documents, "chat" if answers else "document", ",")
    exact = f"; {got.whole} answered exactly ({got.whole / got.documents:.1%})" if answers else ""
    return (
        f"{what}, {counted(got.targets, 'token', ',')}: loss {got.loss:.4f} nats a token,"
        f" {got.bits_per_byte:.4f} bits per byte; next token right"
        f" {got.right / got.targets:.1%}{exact}"
    )
