"""What is printed for people: lines and tables as they are, whatever brackets they hold."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

WIDE = 160  # columns where there is no terminal to ask: tables are not to be cut in a log
FIGURES = slice(1, None)  # columns but the first


def console() -> Console:
    """Standard output, as wide as the terminal or wide enough for every table."""
    made = Console()
    return made if made.is_terminal else Console(width=WIDE)


def say(out: Console, *lines: str) -> None:
    """Print lines, each whole however long it is."""
    for line in lines:
        out.print(line, markup=False, highlight=False, soft_wrap=True)


def show(out: Console, *tables: Table) -> None:
    """Print tables, an empty line behind each."""
    for each in tables:
        out.print(each, markup=False)
        out.print()


def table(*heads: str, right: slice = slice(0)) -> Table:
    """A table without lines. right: the columns of figures."""
    made = Table(*heads, box=None, pad_edge=False)
    for column in made.columns[right]:
        column.justify = "right"
    return made
