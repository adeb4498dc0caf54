"""Sizes as people write them: "2GiB", "500 MB", 1048576."""

from __future__ import annotations

import re

from outsize.errors import OutsizeError

_UNITS = {"": 1, "b": 1}
for _i, _letter in enumerate("kmgtp", start=1):
    _UNITS[_letter] = _UNITS[_letter + "ib"] = 1024**_i
    _UNITS[_letter + "b"] = 1000**_i


def parse_bytes(text: object) -> int:
    """Bytes of "2GiB" (1024^3), "2GB" (1000^3), "2G" (1024^3) or a plain number of bytes."""
    if isinstance(text, int) and text >= 0:
        return text
    if not isinstance(text, str | int | float):
        kind = type(text).__name__
        raise OutsizeError(f"a memory size is text or a number, as 512MiB or 2GiB; here a {kind}")
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-zA-Z]*)\s*", str(text))
    if not match or match[2].lower() not in _UNITS:
        raise OutsizeError(f"memory size {text!r} is not understood; write it as 512MiB or 2GiB")
    return int(float(match[1]) * _UNITS[match[2].lower()])


def format_bytes(count: float) -> str:
    """Bytes as a person reads them, in binary units: "1.50 GiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.2f} {unit}"
        count /= 1024
    return f"{count:.2f} TiB"
