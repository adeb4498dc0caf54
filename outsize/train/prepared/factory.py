"""What "import.path:factory" on a command line names: somebody's own module, made without memory
where that can be."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable

import torch
from torch import nn

from outsize.errors import OutsizeError
from outsize.train.prepared.guessed import line_of


def imported(target: str) -> Callable[[], object]:
    """What is to be called. OutsizeError where there is no such thing, or it needs arguments."""
    path, _, name = target.partition(":")
    try:
        found: object = getattr(importlib.import_module(path), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise OutsizeError(
            f"{target} cannot be imported ({error}); expected import.path:factory, with"
            " PYTHONPATH=. for a file that lies here"
        ) from None
    except Exception as error:  # whatever somebody's code raises
        raise OutsizeError(f"{target} cannot be imported: {line_of(error)}") from error
    if isinstance(found, nn.Module):
        return lambda: found
    if not callable(found):
        raise OutsizeError(f"{target} is a {type(found).__name__}; expected a function")
    needs = _needed(found)
    if needs:
        raise OutsizeError(f"{target} needs {needs}; expected a factory without arguments")
    return found


def made(target: str) -> object:
    """What a factory gives; its tensors are on the meta device where the factory can do without
    their values."""
    factory = imported(target)
    try:
        with torch.device("meta"):
            return factory()
    except Exception:  # whatever somebody's code raises: with values it may not
        pass
    try:
        return factory()
    except Exception as error:
        raise OutsizeError(f"{target} raises {line_of(error)}; expected a module") from error


def _needed(factory: Callable[..., object]) -> str:
    """Names of arguments without a default."""
    try:
        takes = inspect.signature(factory).parameters.values()
    except (TypeError, ValueError):
        return ""
    plain = (p for p in takes if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD))
    return ", ".join(p.name for p in plain if p.default is p.empty)
