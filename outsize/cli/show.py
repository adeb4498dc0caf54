"""Where commands print."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

WIDE = 160  # columns where there is no terminal to ask: tables are not to be cut in a log


def console() -> Console:
    """Standard output, as wide as the terminal or wide enough for every table."""
    from rich.console import Console

    made = Console()
    return made if made.is_terminal else Console(width=WIDE)
