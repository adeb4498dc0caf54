"""Names of a package that are imported when they are first used, so that who needs one part of it
does not wait for all the others."""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any


def importing(package: str, parts: tuple[str, ...] = ()) -> Callable[[str], Any]:
    """The `__getattr__` of a package: what its source imports `if TYPE_CHECKING` is imported from
    there when it is asked for. parts: names that are modules of the package instead."""
    homes = {**_homes(package), **{name: f"{package}.{name}" for name in parts}}

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        home = importlib.import_module(homes[name])
        if name in parts:
            return home
        found = getattr(home, name)
        setattr(sys.modules[package], name, found)
        return found

    return get


def _homes(package: str) -> dict[str, str]:
    """By name, the module that a package imports it from for type checkers."""
    loader: Any = sys.modules[package].__loader__
    found = {}
    for node in ast.parse(loader.get_source(package)).body:
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            for each in node.body:
                assert isinstance(each, ast.ImportFrom) and each.module is not None
                found.update({alias.name: each.module for alias in each.names})
    return found


def called(package: str, home: str) -> None:
    """Make calling a package call the function of its name in the module `home`: `outsize.plan` is
    the package of plans and the function that makes one."""
    name = package.rpartition(".")[2]

    class Called(ModuleType):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return getattr(importlib.import_module(home), name)(*args, **kwargs)

    sys.modules[package].__class__ = Called
