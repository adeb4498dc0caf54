"""How the workers of a run are started, joined, watched and ended."""

from outsize.launch.crew import Crew, enter
from outsize.launch.hosts import run_there
from outsize.launch.local import run_here
from outsize.launch.post import Post
from outsize.launch.pulse import Pulse, Unwatched

__all__ = ["Crew", "Post", "Pulse", "Unwatched", "enter", "run_here", "run_there"]
