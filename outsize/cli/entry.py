"""`outsize` from its first moment: Ctrl-C before a command begins ends it as Ctrl-C in one does."""

from __future__ import annotations

import os
import signal
from types import FrameType

INTERRUPTED = 130  # what shells report for Ctrl-C
NOTHING = "interrupted; nothing had begun that could be saved"


def main() -> None:
    """Import the commands and run the one that was asked for."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # ignored, it stays so
        signal.signal(signal.SIGINT, _leave)
    from outsize.cli.main import main as commands

    commands(prog_name="outsize")


def begun() -> None:
    """From here on Ctrl-C is an exception again, which a command may answer."""
    if signal.getsignal(signal.SIGINT) is _leave:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _leave(number: int, frame: FrameType | None) -> None:
    # No exception: an import that is interrupted may make another one of it.
    os.write(2, f"{NOTHING}\n".encode())
    os._exit(INTERRUPTED)
