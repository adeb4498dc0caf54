"""`outsize new`: a run's file with every line explained."""

from __future__ import annotations

import json
import re
from importlib.resources import files
from pathlib import Path

import click

from outsize.cli.command import Light

RUNS = files("outsize.cli") / "runs"
KINDS = tuple(sorted(one.name.removesuffix(".yaml") for one in RUNS.iterdir()))
_FRESH = {"model": "mini", "data": "stdlib"}  # of pretrain, where nothing is named
_NAMED = {"model": "path/to/model", "data": "chats.jsonl"}


@click.command(cls=Light)
@click.argument("kind", type=click.Choice(KINDS))
@click.argument("file", required=False, type=click.Path(path_type=Path))
@click.option("--model", help="The directory of a model; of pretrain a preset, too.")
@click.option("--data", help="The file of chats, or of text.")
@click.option("--output", help="The run's own directory.")
def new(
    kind: str, file: Path | None, model: str | None, data: str | None, output: str | None
) -> None:
    """Write the file of a run, FILE (KIND.yaml if left out), with every line explained: of training
    all of a model on chats, or an adapter, or one beside weights of four bits, or a model from
    nothing.
    """
    from outsize.errors import OutsizeError
    from outsize.texts import write_text
    from outsize.train.resolve import Resolved, apply_text

    path = file or Path(f"{kind}.yaml")
    if path.exists():
        raise OutsizeError(f"{path} is there already; give another FILE, or remove it")
    text = written(kind, {"model": model, "data": data, "output": output})
    apply_text(Resolved(), text, str(path))  # as it will be read
    write_text(text, path)
    click.echo(f"{path} is written; what it will take: outsize plan {path}; outsize train {path}")


def _row(usual: int, model: str | None) -> str:
    """Tokens of a row, of a model's directory at most as many as it has positions."""
    from outsize.data.tokenizer import settings_in

    said = {} if model is None else settings_in(Path(model).expanduser() / "config.json")
    known = (said.get(name) for name in ("max_position_embeddings", "n_positions"))
    return str(min([usual, *(one for one in known if type(one) is int and one > 0)]))


def written(kind: str, named: dict[str, str | None]) -> str:
    """The file of a kind of run. named: what its model, data and output are, None for left open."""
    text = (RUNS / f"{kind}.yaml").read_text(encoding="utf-8")
    for name, usual in {**(_FRESH if "pre" in kind else _NAMED), "output": f"runs/{kind}"}.items():
        said = json.dumps(named[name] or usual).replace("\\", r"\\")
        text = re.sub(rf"\b{name.upper()}(?= +# )", said, text)
    text = re.sub(r"(?<=\bsequence: )\d+", lambda found: _row(int(found[0]), named["model"]), text)
    lines = [line.partition("  # ") for line in text.splitlines()]
    width = max(len(line.rstrip()) for line, mark, _ in lines if mark)
    return (
        "\n".join(
            f"{line.rstrip():<{width}}{mark}{rest}" if mark else line for line, mark, rest in lines
        )
        + "\n"
    )
