"""The workers of a run: how many, on which mesh, and what each of them does.

One worker trains in this process. Several of this machine are forked from it and watched by it;
those that torchrun has started, on one machine or many, watch one another.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from math import log
from pathlib import Path

import torch
from rich.console import Console

from outsize import accelerator
from outsize.checkpoint.store import OnDamage
from outsize.checkpoint.store import Store as Checkpoints
from outsize.collectives.axes import ordered
from outsize.collectives.mesh import Mesh, grids, parse_mesh
from outsize.errors import OutsizeError, counted
from outsize.hardware.host import cores
from outsize.launch import Mailbox, enter, run_here, run_there
from outsize.launch.hosts import started
from outsize.train import derive
from outsize.train import run as runs
from outsize.train.loop import resume_command
from outsize.train.resolve import Resolved, recorded_values
from outsize.train.seats import seated

MOST = 4096  # processes that one machine is asked to start
KILLED = 128  # more than that: by a signal
STOPPED = (130, 143)  # Ctrl-C and SIGTERM, of which the workers tell themselves


def run_workers(
    said: Callable[[], Resolved],
    directory: Path | None,
    on_damage: OnDamage,
    console: Callable[[], Console],
) -> int:
    """Start the run that was said, or go on with the one in `directory`; gives the exit code.

    said: the values; console: where a worker prints; both are made by the worker that uses them.
    OutsizeError for a mesh of another number of workers, and for whatever makes a run impossible.
    """
    environment = dict(os.environ)
    if started(environment):
        environment = seated(environment, said, directory)
        run_there(lambda post: _work(said(), directory, on_damage, console(), post), environment)
    values = said()
    mesh = mesh_of(values, directory, None)
    if mesh.size == 1:
        return _alone(values, directory, on_damage, console())
    if mesh.size > MOST:
        raise OutsizeError(
            f"workers is {mesh.size}; expected at most {MOST} on one machine: start more with"
            " torchrun, on several"
        )
    if directory is None:
        values = derive.output(values)  # known here, for whoever outlives the workers
    _import_all()
    code = run_here(mesh.size, lambda post: _work(values, directory, on_damage, console(), post))
    if code == 1 or (code > KILLED and code not in STOPPED):
        _say_how_to_go_on(Path(directory or values.get("output")))
    return code


def _say_how_to_go_on(directory: Path) -> None:
    """What a worker that was killed could not say any more."""
    saved = Checkpoints(directory).latest()
    if saved is not None:
        print(f"step {saved} is saved; to go on: {resume_command(directory)}", file=sys.stderr)


def _alone(said: Resolved, directory: Path | None, on_damage: OnDamage, console: Console) -> int:
    if directory is None:
        return runs.start(said, console)
    return runs.resume(directory, _changes(with_workers(said, Mesh(), 1)), on_damage, console)


def _work(
    said: Resolved, directory: Path | None, on_damage: OnDamage, console: Console, post: Mailbox
) -> int:
    """One worker's whole run."""
    mesh = mesh_of(said, directory, post.count)
    device = accelerator.take(said.get("device"), post.here, post.near)
    worker_group = enter(post, mesh, _facts(said), device)
    said = with_workers(said, mesh, post.near)
    if not worker_group.first:
        return runs.follow(console, worker_group)
    if directory is None:
        return runs.start(said, console, worker_group)
    return runs.resume(directory, _changes(said), on_damage, console, worker_group)


# -- the mesh --------------------------------------------------------------------------------------


def mesh_of(said: Resolved, directory: Path | None, started: int | None) -> Mesh:
    """The workers of a run as was said, or else as the run in `directory` had them, where no other
    number of them has started; all on the data axis where there is no mesh.

    OutsizeError where the mesh has another number of workers, with the nearest that has this one.
    """
    text, count = said.get("mesh"), count_of(said.get("workers"), started)
    if text is None and directory is not None:
        recorded = recorded_values(directory)
        had = recorded.get("workers")
        if count in (None, had):
            text, count = recorded.get("mesh"), had
    return Mesh(data=count or 1) if text is None else sized(parse_mesh(text), count)


def over_workers(said: Resolved) -> Resolved:
    """The values of a run whose workers are as was said."""
    mesh = mesh_of(said, None, None)
    return with_workers(said, mesh, mesh.size)


def count_of(said: int | None, started: int | None) -> int | None:
    """How many workers there are, as was said or as have started; None: neither."""
    if started is not None and said not in (None, started):
        raise OutsizeError(
            f"workers is {said}, but WORLD_SIZE says that {started} were started; leave workers"
            f" out, or start {said}"
        )
    return said or started


def sized(mesh: Mesh, count: int | None) -> Mesh:
    """The mesh, refused where there is another number of workers; None: that is open."""
    if count is not None and mesh.size != count:
        raise OutsizeError(
            f"mesh {mesh} has {counted(mesh.size, 'worker')}, and there are {count}; expected for"
            " instance"
            f" {nearest_mesh(mesh, count)}, or {counted(mesh.size, 'worker')}"
        )
    return mesh


def nearest_mesh(mesh: Mesh, count: int) -> Mesh:
    """The mesh of `count` workers whose axes are nearest to those of `mesh`, as ratios."""
    names = tuple(axis.name for axis in ordered(mesh.written()))

    def distance(found: Mesh) -> float:
        return sum(abs(log(found[name] / mesh[name])) for name in names)

    return min(grids(count, names), key=distance)


# -- what one worker has ---------------------------------------------------------------------------


def with_workers(said: Resolved, mesh: Mesh, near: int) -> Resolved:
    """The values with the run's workers, and the threads of each where `near` share a machine."""
    many, text = mesh.size > 1, "the workers that there are"
    said = said.with_value("workers", mesh.size, said.origins.get("workers", text))
    said = said.with_value("mesh", str(mesh) if many else None, said.origins.get("mesh", text))
    if not many or "OMP_NUM_THREADS" in os.environ:
        return said
    each = max(1, cores() // near)
    return said.derive("threads", each, f"{counted(cores(), 'core')} for {counted(near, 'worker')}")


def _changes(said: Resolved) -> list[tuple[str, object, str]]:
    return [(name, value, said.origins[name]) for name, value in said.values.items()]


def _facts(said: Resolved) -> dict[str, str]:
    """What must have been said alike to every worker."""
    return {"torch": torch.__version__} | {n: repr(value) for n, value in said.values.items()}


def _import_all() -> None:
    """What workers import anyway, once for all of them. Nothing here computes: threads that are
    there before a fork are not there after it."""
    import safetensors.torch  # noqa: F401
    import tensorboardX.event_file_writer
    import tensorboardX.proto.event_pb2  # noqa: F401

    from outsize.torch_private import warm_fake_tensors

    warm_fake_tensors()

    import outsize.models.families  # noqa: F401
    from outsize.kernels import native

    native.library()  # compiled, if need be
