"""`outsize merge`: a model that has taken up its adapter."""

from __future__ import annotations

from pathlib import Path

import click

from outsize.cli.command import Command


@click.command(cls=Command)
@click.argument("directory", type=click.Path(path_type=Path))
@click.option(
    "--into", required=True, type=click.Path(path_type=Path), help="A new directory for the model."
)
@click.option("--dtype", help="Of the weights: float32, bfloat16, float16; else the base's.")
def merge(directory: Path, into: Path, dtype: str | None) -> None:
    """Write the model that computes what the one in DIRECTORY (a run, a checkpoint, an adapter's
    directory) does with its adapter, or with factors in the place of weights, as a plain Hugging
    Face directory. How far rounding moves the logits is printed.
    """
    import torch

    from outsize.errors import OutsizeError
    from outsize.serve.export import merge as write

    kinds = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if dtype is not None and dtype not in kinds:
        raise OutsizeError(f"dtype is {dtype!r}; expected one of {', '.join(kinds)}")
    for line in write(directory, into, None if dtype is None else kinds[dtype]):
        click.echo(line, err=line.startswith("warning"))
