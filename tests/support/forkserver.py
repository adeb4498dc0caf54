"""The server that processes of tests are forked from. Each process of pytest has one: all its tests
ask it here, since who comes first says what it imports for everybody."""

from __future__ import annotations

import multiprocessing
import os
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from pathlib import Path
from unittest.mock import patch


def context() -> ForkServerContext:
    """Forks processes that have imported what tests need (imported.py), and computed nothing."""
    made = multiprocessing.get_context("forkserver")
    made.set_forkserver_preload(["imported"])
    # Python 3.11 looks for it where a new process would, and is silent about what is not there.
    with patch.dict(os.environ, PYTHONPATH=str(Path(__file__).resolve().parent)):
        forkserver.ensure_running()
    return made
