"""`outsize merge`: a model that has taken up its adapter."""

from __future__ import annotations

import shutil
from pathlib import Path

import click

from outsize.cli.command import Command

TOKENS = 64  # that both models are compared on


@click.command(cls=Command)
@click.argument("directory", type=click.Path(path_type=Path))
@click.option(
    "--into", required=True, type=click.Path(path_type=Path), help="A new directory for the model."
)
@click.option("--dtype", help="Of the weights that are written: float32, bfloat16, float16.")
def merge(directory: Path, into: Path, dtype: str | None) -> None:
    """Write the model that computes what the one in DIRECTORY (a run, a checkpoint, an adapter's
    directory) does with its adapter, as a plain Hugging Face directory. Weights of few bits are
    read as their own files have them. How far rounding moves the logits is printed.
    """
    import torch

    from outsize.checkpoint import adapters, hub
    from outsize.checkpoint.adapters import ADAPTER_CONFIG, described, model_directory
    from outsize.errors import OutsizeError
    from outsize.models.coding import PLAIN, asked
    from outsize.train.tokenizer_files import COPIED

    kinds = {str(kind).removeprefix("torch."): kind for kind in (
        torch.float32, torch.bfloat16, torch.float16
    )}  # fmt: skip
    if dtype is not None and dtype not in kinds:
        raise OutsizeError(f"--dtype is {dtype!r}; expected one of {', '.join(kinds)}")
    found = model_directory(directory)
    if not (found / ADAPTER_CONFIG).is_file():
        raise OutsizeError(f"{found} has no adapter ({ADAPTER_CONFIG}); there is nothing to merge")
    if into.exists() and (not into.is_dir() or any(into.iterdir())):
        raise OutsizeError(f"--into {into} is there already; give a directory that is new or empty")
    config = asked(adapters.read_config(found), PLAIN, "merge")
    model = adapters.load(found, None if dtype is None else kinds[dtype], config=config)
    ids = torch.randint(
        0, model.config.vocab, (1, TOKENS), generator=torch.Generator().manual_seed(0)
    )
    with torch.no_grad():
        before = model(ids)
        after = adapters.merge(model)(ids)
    hub.save(model, into)
    base = described(found)[1]
    for name in COPIED:
        for folder in (found, base):
            if (folder / name).is_file():
                shutil.copyfile(folder / name, into / name)
                break
    moved = float((after - before).abs().max())
    size = float(before.abs().max())
    click.echo(
        f"{into}: {base} with the adapter of {found}; rounding moved logits by {moved:.2g} at most"
        f" (they are up to {size:.3g})"
    )
