"""`outsize export`: a model as other programs read it."""

from __future__ import annotations

from pathlib import Path

import click

from outsize.cli.command import Command


@click.command(cls=Command)
@click.argument("directory", type=click.Path(path_type=Path))
@click.option("--to", "kind", required=True, help="hf, peft, or gguf:TYPE (F16 if left out).")
@click.option("--into", required=True, type=click.Path(path_type=Path), help="A new path.")
@click.option("--rank", help="Of a low-rank adapter this rank alone; middle: of an elastic one.")
def export(directory: Path, kind: str, into: Path, rank: str | None) -> None:
    """Write the model in DIRECTORY, a run, a checkpoint or a model, as a plain Hugging Face
    directory (an adapter is merged, codes are decoded), its adapter as peft has it, or one GGUF
    file for llama.cpp."""
    from outsize.serve.export import export as write

    for line in write(directory, kind, into, rank):
        click.echo(line, err=line.startswith("warning"))
