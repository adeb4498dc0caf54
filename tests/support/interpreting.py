"""Triton's kernels on the host: its interpreter runs them, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest


def _why_not() -> str:
    if find_spec("triton") is None:
        return "Triton comes with PyTorch for GPUs"
    here = tuple(int(part) for part in version("triton").split(".")[:2])
    if here <= (3, 6) and np.lib.NumpyVersion(np.__version__) >= "2.4.0":
        return "the interpreter of Triton 3.6 calls int() on arrays, which NumPy 2.4 refuses"
    return ""


interpreted = pytest.mark.skipif(bool(_why_not()), reason=_why_not() or "it is there")


def interpret(path: str, function: str) -> None:
    """Call a function of a file of tests where Triton interprets: it is told so before it is
    imported."""
    folder, name = Path(path).parent, Path(path).stem
    run = f"import sys; sys.path.insert(0, {str(folder)!r}); import {name}; {name}.{function}()"
    ours = os.pathsep.join(map(str, sys.path))
    subprocess.run(
        [sys.executable, "-c", run],
        check=True,
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": ours},
    )
