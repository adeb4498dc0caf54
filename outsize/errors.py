"""The one error type that users see: a single line with what, value, expectation and remedy."""

from __future__ import annotations

from collections.abc import Collection


class OutsizeError(ValueError):
    """Something the user can mend: the message is one line naming what, its value, what was
    expected and what to do. The command line prints it without a traceback and exits with 2."""


class TooLong(OutsizeError):
    """More tokens than a request may have, with those that it may draw."""


class Everywhere(OutsizeError):
    """One that all workers of a run raise at once: it follows from numbers that all have."""


def expect(holds: bool, what: str, value: object, expected: str) -> None:
    """OutsizeError "WHAT is VALUE; expected EXPECTED" where something does not hold."""
    if not holds:
        raise OutsizeError(f"{what} is {value}; expected {expected}")


def counted(count: int, thing: str, form: str = "") -> str:
    """A number of things: "1 byte", "2 bytes". form: of the number, as format() has it."""
    ending = "" if count == 1 else "es" if thing.endswith("ch") else "s"
    return f"{count:{form}} {thing}{ending}"


def nearest(name: str, known: list[str] | tuple[str, ...], listed: Collection[str] = ()) -> str:
    """The ending "; did you mean 'x'?" for an unknown name, or a list of what there is. listed:
    what stands in the list, where all that is known were too long for a line."""
    import difflib

    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    if close:
        return f"; did you mean {close[0]!r}?"
    return f"; known: {', '.join(sorted(listed or known))}"
