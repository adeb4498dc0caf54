"""`outsize keys`: every key of a run and of its techniques, with meaning, default and range."""

from __future__ import annotations

import click

from outsize.cli.command import Light


@click.command(cls=Light)
@click.argument("name", required=False)
def keys(name: str | None) -> None:
    """List the keys that a run's file or --set can say. NAME: a key, a section as train, or a
    technique."""
    from outsize.errors import OutsizeError, nearest
    from outsize.registry import TECHNIQUES
    from outsize.screen import console, table
    from outsize.train.config import leaves, technique_leaves
    from outsize.train.other_trainers import here
    from outsize.train.resolve import shown

    every = {**leaves(), **technique_leaves()}
    found = [key for key in every if name is None or key == name or key.startswith(f"{name}.")]
    if not found:
        assert name is not None
        if (ours := here(name)) is not None:
            raise OutsizeError(f"key {name!r} is not known; here it is {ours}")
        sections = {key.rpartition(".")[0] for key in every} - {"", *every}
        tops = {key.partition(".")[0] for key in every}
        known = nearest(name, (*every, *sections), tops)
        raise OutsizeError(f"key {name!r} is not known{known}")
    made = table("key", "default", "range", "meaning")
    for key in found:
        leaf = every[key]
        default = "off" if TECHNIQUES.find(key) else shown(leaf.default)
        made.add_row(key, default, leaf.range or "-", leaf.meaning)
    console().print(made, markup=False)
