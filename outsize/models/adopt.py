"""Finding the blocks of somebody else's module.

A block is one of several like children of a container that hold most of the model's parameters and
are called one after another: the layers of a transformer, the residual units of a ResNet. They are
found by shape of the module tree, or named by a path pattern.
"""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from torch import nn

from outsize.errors import OutsizeError

_CONTAINERS = (nn.ModuleList, nn.Sequential)


def find_blocks(
    model: nn.Module, pattern: str | Sequence[str] | None = None
) -> list[tuple[str, nn.Module]]:
    """The blocks of a model as (path, module), in the order of the module tree.

    pattern: shell-style path patterns such as "encoder.layers.*", of several in their order; None:
    find them. A model without blocks is an error that says what was looked at.
    """
    if pattern is not None:
        return _named(model, [pattern] if isinstance(pattern, str) else list(pattern))
    found = _search("", model)
    if not found:
        raise OutsizeError(
            f"{type(model).__name__} cannot be split: no nn.ModuleList or nn.Sequential in it holds"
            f" blocks of parameters ({_children(model)}); name the blocks by a path pattern,"
            " as blocks='encoder.layers.*'"
        )
    return found


def _named(model: nn.Module, patterns: list[str]) -> list[tuple[str, nn.Module]]:
    def matches(name: str, pattern: str) -> bool:
        return fnmatchcase(name, pattern) and name.count(".") == pattern.count(".")

    if not patterns:
        raise OutsizeError(
            "blocks is []; expected path patterns as ['encoder.layers.*'], or None to find them"
        )
    every = [(name, module) for name, module in model.named_modules() if name]
    found = list(dict.fromkeys(pair for p in patterns for pair in every if matches(pair[0], p)))
    if not found:
        raise OutsizeError(
            f"blocks {', '.join(patterns)!r} name no module of {type(model).__name__};"
            f" its children are {_children(model)}"
        )
    return found


def _children(model: nn.Module) -> str:
    return ", ".join(f"{n}: {type(m).__name__}" for n, m in model.named_children()) or "none"


def _search(path: str, module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Blocks of the outermost containers that have them."""
    children = [
        (f"{path}.{name}" if path else name, child) for name, child in module.named_children()
    ]
    if isinstance(module, _CONTAINERS) and _alike([child for _, child in children]):
        return [(name, child) for name, child in children if _size(child)]
    deeper = [pair for name, child in children for pair in _search(name, child)]
    if deeper or not isinstance(module, nn.Sequential):
        return deeper
    return [(name, child) for name, child in children if _size(child)] if len(children) > 1 else []


def _alike(children: list[nn.Module]) -> bool:
    """Two or more inner modules with parameters, most of one class: blocks, not leaves."""
    inner = [
        type(child) for child in children if _size(child) and any(True for _ in child.children())
    ]
    if len(inner) < 2:
        return False
    return max(inner.count(kind) for kind in set(inner)) * 2 >= len(children)


def _size(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())
