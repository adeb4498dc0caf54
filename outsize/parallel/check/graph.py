"""A module's operators over whole shapes, as data (traced by outsize/parallel/check/trace.py)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

Site = tuple[str, str]  # path of a module, "input" | "product" | "output"


@dataclass(frozen=True)
class Ref:
    """A tensor in the arguments of a node, by its number."""

    index: int


@dataclass(frozen=True)
class Value:
    """One tensor of a trace."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    name: str  # of the parameter, or what made it where
    learns: bool = False  # a parameter that requires a gradient

    @property
    def floats(self) -> bool:
        """Whether it can have a gradient."""
        return self.dtype.is_floating_point


@dataclass(frozen=True)
class Node:
    """One operator. op: the name of its rule; run: what was called, with args and kwargs in which
    tensors are Refs; module: the path of the innermost module that was running. site: of a node
    that only marks a place."""

    op: str
    run: Callable[..., Any] | None
    args: Any
    kwargs: Mapping[str, Any]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    module: str
    site: Site | None = None


@dataclass(frozen=True)
class Graph:
    """Operators in the order in which they ran. inputs, outputs: of the whole module, tensors only;
    parameters: by name, those that were used."""

    values: tuple[Value, ...]
    nodes: tuple[Node, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    parameters: Mapping[str, int]
