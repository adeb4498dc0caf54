"""Text files that are whole or not there."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from outsize.errors import OutsizeError


def read_text(path: str | Path, remedy: str = "") -> str:
    """A file as UTF-8. OutsizeError where it cannot be read; remedy: what to do then."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError:
        reason = "not text in UTF-8"
    except OSError as error:
        reason = error.strerror or str(error)
    raise OutsizeError(f"{path} cannot be read: {reason}{remedy and '; '}{remedy}")


def write_text(text: str, path: str | Path) -> Path:
    """Write text beside its place, then rename: a reader sees the old file or the new one.

    Raises OutsizeError naming the path when it cannot be written.
    """
    target = Path(path)
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(8)}")
    try:
        try:
            with temporary.open("x", encoding="utf-8") as file:
                file.write(text)
            os.replace(temporary, target)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        reason = error.strerror or str(error)
        raise OutsizeError(
            f"{target}: cannot write ({reason}); choose a folder that can be written"
        ) from None
    return target
