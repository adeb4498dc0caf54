"""What a module is given and gives, as a list of leaves: PyTorch's own trees, with dataclasses
opened, which these take for leaves, so that a tensor in one would be nobody's.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from outsize.torch_private import TreeSpec, tree_flatten, tree_unflatten


@dataclass(frozen=True)
class Tree:
    """The form of a value. opened: by place among the leaves of `spec`, an empty copy of the
    dataclass that is there, and the form of its fields by name."""

    spec: TreeSpec
    opened: dict[int, tuple[Any, Tree]]

    def __str__(self) -> str:
        inside = {place: (type(one), str(form)) for place, (one, form) in self.opened.items()}
        return f"{self.spec} {inside}"


def flatten(value: Any, frozen: bool = False) -> tuple[list[Any], Tree]:
    """The leaves of a value, and its form. frozen: open such dataclasses alone as nobody writes
    into; others stay the object that they are, for whoever reads what was written."""
    found, spec = tree_flatten(value)
    leaves: list[Any] = []
    opened: dict[int, tuple[Any, Tree]] = {}
    for place, leaf in enumerate(found):
        if not _opens(leaf, frozen):
            leaves.append(leaf)
            continue
        fields = {f.name: getattr(leaf, f.name) for f in dataclasses.fields(leaf)}
        inside, form = flatten(fields, frozen)
        opened[place] = (_filled(leaf, dict.fromkeys(fields)), form)
        leaves += inside
    return leaves, Tree(spec, opened)


def unflatten(leaves: Sequence[Any], tree: Tree) -> Any:
    """A value of this form with these leaves."""
    return _taken(iter(leaves), tree)


def _taken(leaves: Iterator[Any], tree: Tree) -> Any:
    found = []
    for place in range(tree.spec.num_leaves):
        if place in tree.opened:
            empty, form = tree.opened[place]
            found.append(_filled(empty, _taken(leaves, form)))
        else:
            found.append(next(leaves))
    return tree_unflatten(found, tree.spec)


def _filled(one: Any, fields: dict[str, Any]) -> Any:
    """A copy of a dataclass with other values, without a call of what it does when it is made."""
    made = copy.copy(one)
    for name, value in fields.items():
        object.__setattr__(made, name, value)  # of a frozen one too
    return made


def _opens(leaf: Any, frozen: bool) -> bool:
    if not dataclasses.is_dataclass(leaf) or isinstance(leaf, type):
        return False
    return not frozen or bool(leaf.__dataclass_params__.frozen)  # type: ignore[attr-defined]
