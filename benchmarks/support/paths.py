"""Paths that are said on the command line."""

from __future__ import annotations

import os


def whole_path(text: str) -> str:
    """A program as it was said, from wherever it is started: a path from here on, or a command's
    name. Links stay: the Python of an environment is one."""
    return os.path.abspath(text) if os.sep in text else text
