"""PyTorch, imported without its kernels for tensors that have no memory.

They are thousands of Python functions, whose registration is a fifth of what its import takes, and
what generates, serves or converts computes with no such tensor: it makes them, to name shapes. They
come when fake tensors or anything else of PyTorch asks for them, and when `come` is called. This
module is imported before PyTorch is.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

KERNELS = "torch._meta_registrations"
# What reads them, or comes with them: fake tensors, torch.compile and torch.export import these.
ASK = {
    "torch._decomp",
    "torch._dynamo",
    "torch._prims",
    "torch._refs",
    "torch.utils._content_store",
}


class _Absent(ModuleType):
    """Stands for the kernels until one is asked for."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(come(), name)


class _AbsentLoader(Loader):
    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Absent(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


class _There(Loader):
    """Of a module that has come with the kernels while it was looked for."""

    def __init__(self, module: ModuleType) -> None:
        self.module, self.own = module, module.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self.module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self.own


class _Finder(MetaPathFinder):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name == KERNELS:
            return ModuleSpec(name, _AbsentLoader())
        if name not in ASK:
            return None
        come()
        found = sys.modules.pop(name, None)  # or Python takes it to be imported by now, twice
        return None if found is None else ModuleSpec(name, _There(found))


_finder = _Finder()


def put_off() -> None:
    """Have PyTorch do without these kernels until they are asked for, where it is not imported."""
    if "torch" not in sys.modules and _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)


def come() -> ModuleType:
    """Import the kernels, if they were put off."""
    if _finder in sys.meta_path:
        sys.meta_path.remove(_finder)
    if isinstance(sys.modules.get(KERNELS), _Absent):
        del sys.modules[KERNELS]
    return importlib.import_module(KERNELS)
