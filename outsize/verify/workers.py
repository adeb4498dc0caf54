"""verify over real processes of this machine, which talk as those of a run do."""

from __future__ import annotations

import os
import pickle
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from outsize import accelerator
from outsize.collectives import Mesh
from outsize.errors import OutsizeError
from outsize.launch import Mailbox, WorkerGroup, enter, run_here
from outsize.plan import from_yaml, to_yaml
from outsize.verify.case import Case
from outsize.verify.planned import judging
from outsize.verify.verify import Verdict, judged, planned_runs

REFUSED = 2  # the exit code of an OutsizeError


def in_processes(mesh: Mesh, make: Callable[[], Case], device: str = "cpu") -> Verdict | int:
    """The verdict of the first worker, or the exit code where the workers failed; why is on
    standard error then. make: the case, made in every worker; device: as the case has it, one each
    of an accelerator. This process must not have computed.
    """
    handle, name = tempfile.mkstemp(prefix="outsize-verify-")
    os.close(handle)
    path = Path(name)
    try:
        code = run_here(mesh.size, lambda post: _work(post, mesh, make, path, device))
        if code:
            return code
        found = pickle.loads(path.read_bytes())  # written by a child of this process
        assert isinstance(found, Verdict)
        return found
    finally:
        path.unlink(missing_ok=True)


def _work(post: Mailbox, mesh: Mesh, make: Callable[[], Case], path: Path, device: str) -> int:
    torch.set_num_threads(1)
    device = accelerator.take(judging(device, mesh.size), post.here, post.near)
    worker_group = enter(post, mesh, {"torch": torch.__version__}, device)
    worker_group.pulse.at("making the case")
    made = worker_group.in_turn("case", make)
    case = replace(_told(worker_group, made), device=device)
    worker_group.pulse.at("the plan's run")
    runs = planned_runs(case, worker_group.world)
    if worker_group.first:
        worker_group.pulse.at("the plain run")
        path.write_bytes(pickle.dumps(judged(case, runs)))
    return 0


def _told(worker_group: WorkerGroup, case: Case) -> Case:
    """With the first worker's plan: what each has measured on its own makes other schedules."""
    return replace(case, plan=from_yaml(worker_group.told("plan", lambda: to_yaml(case.plan))))


def judge(case: Case) -> Verdict | str:
    """Of a draw. OutsizeError where it is refused."""
    found = in_processes(case.plan.mesh, lambda: case, device=case.device)
    if found == REFUSED:
        raise OutsizeError("verify: the workers refused the plan")
    return f"the workers failed with {found}" if isinstance(found, int) else found
