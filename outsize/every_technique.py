"""Importing this module imports all techniques, one file each, and so registers them."""

from __future__ import annotations

import importlib
import pkgutil

from outsize import techniques

for _module in pkgutil.walk_packages(techniques.__path__, f"{techniques.__name__}."):
    importlib.import_module(_module.name)
