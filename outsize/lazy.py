"""Names of a package that are imported when they are first used, so that who needs one part of it
does not wait for all the others."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any


def importing(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """The `__getattr__` of a package. homes: by name, the module that has it; that of a package's
    own part is the part itself."""

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        home = importlib.import_module(homes[name])
        if homes[name] == f"{package}.{name}":
            return home
        found = getattr(home, name)
        setattr(sys.modules[package], name, found)
        return found

    return get


def called(package: str, home: str) -> None:
    """Make calling a package call the function of its name in the module `home`: `outsize.plan` is
    the package of plans and the function that makes one."""
    name = package.rpartition(".")[2]

    class Called(ModuleType):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return getattr(importlib.import_module(home), name)(*args, **kwargs)

    sys.modules[package].__class__ = Called
