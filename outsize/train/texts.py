"""Small text files of a run, whole or not there."""

from __future__ import annotations

import os
from pathlib import Path

from outsize.errors import OutsizeError


def read_text(path: Path) -> str:
    """A file as UTF-8. OutsizeError where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise OutsizeError(f"{path} cannot be read: {error}") from None


def write_text(path: Path, text: str) -> None:
    """Whole or not at all, under its name in one step."""
    fresh = path.with_name(f".{path.name}-{os.getpid()}")
    try:
        fresh.write_text(text, encoding="utf-8")
        os.replace(fresh, path)
    except OSError as error:
        raise OutsizeError(f"cannot write {path}: {error.strerror}") from error
