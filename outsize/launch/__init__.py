"""How the workers of a run are started, joined, watched and ended."""

from typing import TYPE_CHECKING

from outsize.lazy import importing

if TYPE_CHECKING:
    from outsize.launch.group import WorkerGroup, enter
    from outsize.launch.heartbeat import Heartbeat, Mailbox
    from outsize.launch.hosts import run_there
    from outsize.launch.local import Speaker, run_here

__getattr__ = importing(__name__)
