"""Workers as threads, under the name that tests import."""

from outsize.collectives.threads import Board, Meeting, Threads, ThreadWorld, play

__all__ = ["Board", "Meeting", "ThreadWorld", "Threads", "play"]
