"""Seconds and bytes as a person reads them: three or four digits, a unit, thousands separators."""

from __future__ import annotations

_BYTES = ("B", "KiB", "MiB", "GiB", "TiB")


def seconds(value: float) -> str:
    """ "1.234 s", "12.3 ms", "456 µs"; "0 s" for nothing."""
    if value == 0:
        return "0 s"
    size = abs(value)
    if size >= 0.9995:
        return f"{_digits(value)} s"
    if size >= 0.9995e-3:
        return f"{_digits(value * 1e3)} ms"
    return f"{_digits(value * 1e6)} µs"


def binary_bytes(value: int) -> str:
    """ "512 B", "1.50 MiB", "12,345 TiB": powers of 1024, as memory is counted."""
    scaled, unit = float(value), 0
    while abs(scaled) >= 1023.5 and unit < len(_BYTES) - 1:
        scaled, unit = scaled / 1024, unit + 1
    return f"{value:,} B" if unit == 0 else f"{_digits(scaled)} {_BYTES[unit]}"


def signed_percent(new: float, old: float) -> str:
    """How much new exceeds old: "+4.2%", with a true minus sign below."""
    if old == 0:
        return "–"
    return f"{(new / old - 1) * 100:+.1f}%".replace("-", "\N{MINUS SIGN}")


def _digits(value: float) -> str:
    """About three significant digits, more only where the whole part has more."""
    size = abs(value)
    places = 2 if size < 9.995 else 1 if size < 99.95 else 0
    return f"{value:,.{places}f}"
