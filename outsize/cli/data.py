"""`outsize data`: what a run would train on, before it does, and tokenizers of one's own."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from outsize.cli.command import Light

if TYPE_CHECKING:
    from rich.console import Console

    from outsize.data.shown import Overview, Piece
    from outsize.train.resolve import Resolved

_STYLES = {"context": "dim", "target": "bold green", "cut": "red strike"}
_BRACKETS = {"context": ("", ""), "target": ("⟦", "⟧"), "cut": ("⟪", "⟫")}


@click.group()
def data() -> None:
    """Look at data as a run reads them; train a tokenizer."""


@data.command(cls=Light)
@click.argument("files", nargs=-1, required=True)
@click.option("--model", help="A model's directory, whose tokenizer and template are taken.")
@click.option("--sequence", type=click.IntRange(1), help="Tokens of a row.")
@click.option(
    "--count",
    default=3,
    show_default=True,
    type=click.IntRange(0),
    help="Samples that are shown.",
)
@click.option("--page", type=click.Path(path_type=Path), metavar="FILE", help="Write a page, too.")
@click.option("--set", "sets", multiple=True, metavar="KEY=VALUE", help="Set a key; repeatable.")
def show(
    files: tuple[str, ...],
    model: str | None,
    sequence: int | None,
    count: int,
    page: Path | None,
    sets: tuple[str, ...],
) -> None:
    """Show samples of FILES with their targets marked, how long they are and what is cut off.
    FILES: data, or the file of a run."""
    from outsize.data.shown import look
    from outsize.screen import console, say
    from outsize.train import derive
    from outsize.train.recipe import data_config

    resolved = derive.source(_resolved(files, model, sequence, sets))
    config = data_config(resolved.config, resolved.get("data.tokenizer"))
    overview = look(config, resolved.get("train.sequence"), count)
    out = console()
    _print(overview, out)
    if page is not None:
        from outsize.report.samples import write_samples

        title = ", ".join(Path(one).name for one in config.paths())
        say(out, f"page: {write_samples(page, overview, title)}")


def _resolved(
    files: tuple[str, ...], model: str | None, sequence: int | None, sets: tuple[str, ...]
) -> Resolved:
    """The keys that say how data are read, as a run has them."""
    from outsize.checkpoint.adapters import tokenizer_directory
    from outsize.train.derive import row_of
    from outsize.train.model import directory_of
    from outsize.train.resolve import as_sets, is_file, resolve

    run = files[0] if len(files) == 1 and is_file(files[0]) and files[0].endswith("ml") else None
    own = {
        "data.path": None if run else list(files),
        "model.name": model,
        "train.sequence": sequence,
    }
    resolved, directory = directory_of(resolve(run, (*as_sets(own), *sets)))
    if directory is None:
        return row_of(resolved.derive("data.tokenizer", "bytes", "a preset's"), Path())
    home = tokenizer_directory(directory)
    has = (home / "tokenizer.json").is_file()
    resolved = resolved.derive("data.tokenizer", str(home) if has else "bytes", "the model's")
    return row_of(resolved, home)


def _print(overview: Overview, out: Console) -> None:
    from outsize.screen import say

    say(out, *overview.lines())
    marks = "green" if out.is_terminal else "in ⟦ ⟧"
    cut = "; struck out: cut off" if out.is_terminal else "; in ⟪ ⟫: cut off"
    say(out, f"targets: {marks}{cut if any(overview.cut) else ''}")
    for number, sample in enumerate(overview.shown, start=1):
        out.print()
        left = f", {sample.cut:,} cut off" if sample.cut else ""
        name = sample.where or f"sample {number}"
        say(out, f"{name}: {sample.tokens:,} tokens, {sample.targets:,} targets{left}")
        for piece in sample.pieces:
            _print_piece(piece, out)
        out.print()


def _print_piece(piece: Piece, out: Console) -> None:
    if out.is_terminal:
        style = _STYLES[piece.kind]
        out.print(piece.text, style=style, markup=False, highlight=False, end="", soft_wrap=True)
        return
    before, behind = _BRACKETS[piece.kind]
    weight = f"×{piece.weight:g}" if piece.kind == "target" and piece.weight != 1 else ""
    text = f"{before}{piece.text}{behind}{weight}"
    out.print(text, markup=False, highlight=False, end="", soft_wrap=True)


@data.command(cls=Light)
@click.argument("files", nargs=-1, required=True)
@click.option("--vocabulary", required=True, type=int, help="Its ids, special tokens included.")
@click.option(
    "--into", required=True, type=click.Path(path_type=Path), metavar="DIR", help="Where it goes."
)
@click.option("--field", default="text", show_default=True, help="The field that has the text.")
def tokenizer(files: tuple[str, ...], vocabulary: int, into: Path, field: str) -> None:
    """Train a byte-level BPE tokenizer on FILES (texts or chats), the same each time."""
    from outsize.data.vocabulary import make
    from outsize.screen import console, say

    made = make(files, field, vocabulary, into)
    lack = "" if made.size == vocabulary else f" (of {vocabulary:,}: the text has no more pairs)"
    line = f"{into}: {made.size:,} ids{lack}, {made.rate:.2f} bytes a token; {made.log.summary()}"
    say(console(), line)
