"""What a schedule asks of its numbers: errors that say the condition and the nearest that holds."""

from __future__ import annotations

from outsize.errors import OutsizeError


def at_least(name: str, what: str, value: int, least: int) -> None:
    """Refuse a number below the least that the schedule is defined for."""
    if value < least:
        raise OutsizeError(
            f"{name}: {what} is {value}; expected at least {least}; the nearest is {least}"
        )


def even(name: str, what: str, value: int) -> None:
    """Refuse an odd number."""
    if value % 2:
        raise OutsizeError(
            f"{name}: {what} is {value}; expected an even number; the nearest is {value + 1}"
        )


def basic(name: str, devices: int, microbatches: int, chunks: int = 1) -> None:
    """Refuse what no schedule has."""
    at_least(name, "devices", devices, 1)
    at_least(name, "microbatches", microbatches, 1)
    at_least(name, "chunks", chunks, 1)
