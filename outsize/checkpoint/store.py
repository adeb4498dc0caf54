"""Training checkpoints of one run, of which there is always a whole one.

A checkpoint is written beside its place, synced, and renamed into it; then the pointer file says
so, and only then may older ones go. Whatever dies at whatever moment leaves what was there before.
What has no valid manifest is no checkpoint. One process at a time may write.

    runs/mine/.lock                held by the writing process
    runs/mine/latest               "step-00000042"
    runs/mine/best                 a link to a checkpoint that is kept under this name
    runs/mine/step-00000042/       config.json model.safetensors optimizer.safetensors manifest.json
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Literal, Self

from outsize.checkpoint.contents import Named, write_contents, write_synced
from outsize.checkpoint.manifest import JSON, as_json
from outsize.checkpoint.opened import Checkpoint, DamageError, open_contents, read_manifest
from outsize.checkpoint.writing import remove, sync_directory
from outsize.errors import OutsizeError

OnDamage = Literal["refuse", "previous"]

POINTER_NAME, LOCK_NAME = "latest", ".lock"
SHARD_BYTES = 1 << 30  # tensors made for the occasion are held until their shard is written
_STEP = re.compile(r"step-([0-9]{8,15})")
_LEFT_BEHIND = re.compile(r"\.(saving|removing|latest|link)-[0-9]{8,15}-[0-9]+")


class Store:
    """The checkpoints in `directory`; nothing is touched before `acquire` or `save`.

    `keep_last`: how many to keep, all if None. `shard_bytes`: the size a tensor file may reach.
    Leaving it as a context manager, or `release`, lets other runs write there.
    """

    def __init__(
        self, directory: str | Path, keep_last: int | None = None, shard_bytes: int = SHARD_BYTES
    ) -> None:
        if keep_last is not None and keep_last < 1:
            raise OutsizeError(f"keep_last is {keep_last}; expected at least 1, or None for all")
        self.directory = Path(directory)
        self.keep_last = keep_last
        self.shard_bytes = shard_bytes
        self._lock = DirectoryLock(self.directory)

    # --- who may write ----------------------------------------------------------------------------

    def acquire(self) -> None:
        """Become the one writer: makes the directory, clears what dead runs left half-written.

        OutsizeError if another run has it (its pid is named) or it cannot be written.
        """
        if self._lock.held:
            return
        try:
            if not self.directory.is_dir():
                self.directory.mkdir(parents=True, exist_ok=True)
                sync_directory(self.directory.parent)
            self._lock.acquire()
        except OSError as error:
            raise OutsizeError(
                f"cannot keep checkpoints in {self.directory}: {error.strerror}; expected a "
                "directory that can be written: choose another"
            ) from error
        for name in self._entries():  # holding the lock, whoever made these is gone
            if _LEFT_BEHIND.fullmatch(name):
                remove(self.directory / name)

    def release(self) -> None:
        self._lock.release()

    def __enter__(self) -> Self:
        self.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    # --- what there is ----------------------------------------------------------------------------

    def path(self, step: int) -> Path:
        """Where the checkpoint of a step lies, whether or not there is one."""
        return self.directory / _step_name(step)

    def steps(self) -> list[int]:
        """The steps with a valid manifest, ascending."""
        return [step for step in self._candidates() if self._is_valid(step)]

    def latest(self) -> int | None:
        """The step to go on from: the last one, None if there is none.

        One whose manifest has been damaged counts if the pointer names it, so that loading it is
        refused rather than work being lost in silence.
        """
        pointed = self.pointed
        for step in reversed(self._candidates()):
            if step == pointed or self._is_valid(step):
                return step
        return None

    # --- reading ----------------------------------------------------------------------------------

    def load(self, step: int | None = None, on_damage: OnDamage = "refuse") -> Checkpoint:
        """The checkpoint of `step`, by default the latest.

        "refuse" raises DamageError, naming file and tensor, for one that is not as written (its
        tensors are checked as they are read); "previous" reads everything once beforehand and
        takes the nearest earlier one that is whole. OutsizeError if there is none.
        """
        wanted = self.latest() if step is None else step
        if wanted is None:
            raise OutsizeError(
                f"no checkpoint in {self.directory}; expected {_step_name(0)[:-8]}* in it: check "
                "the path, or start anew"
            )
        there = self._candidates()
        if wanted not in there:
            known = ", ".join(map(str, self.steps())) or "none"
            raise OutsizeError(
                f"no checkpoint of step {wanted} in {self.directory}; there are: {known}"
            )
        if on_damage == "refuse":
            return self._open_or_refuse(wanted)
        passed: list[str] = []
        for candidate in reversed([found for found in there if found <= wanted]):
            try:
                checkpoint = self._open(candidate)
                checkpoint.verify()
                return replace(checkpoint, passed_over=tuple(passed))
            except DamageError as error:
                passed.append(str(error))
        raise DamageError(f"no whole checkpoint left in {self.directory}: {'; '.join(passed)}")

    def _open_or_refuse(self, step: int) -> Checkpoint:
        try:
            return self._open(step)
        except DamageError as error:
            before = [found for found in self.steps() if found < step]
            remedy = (
                f"or go on from the one before, step {before[-1]}"
                if before
                else ("there is none before it")
            )
            raise DamageError(f"{error}: restore it from a copy, {remedy}") from error

    def _open(self, step: int) -> Checkpoint:
        checkpoint = open_contents(self.path(step))
        if checkpoint.step != step:
            raise DamageError(f"{self.path(step)} holds step {checkpoint.step}, not {step}")
        return checkpoint

    # --- writing ----------------------------------------------------------------------------------

    def save(
        self,
        step: int,
        tensors: Iterable[Named],
        meta: Mapping[str, JSON],
        files: Callable[[Path], None] | None = None,
    ) -> Path:
        """Save `tensors` (group, name, tensor), `meta` and what `files` writes into the directory
        it is given, as the checkpoint of `step`; returns where. Durable when it returns.

        Tensors are let go shard by shard. OutsizeError if the system refuses (what was there
        before stays as it was), if `step` is saved already, or if another run writes there.
        """
        assert step >= 0
        plain = {key: as_json(value, f"meta[{key!r}]") for key, value in meta.items()}
        self.ready(step)
        temporary = self.directory / f".saving-{step:08d}-{os.getpid()}"
        pointer = self.directory / f".latest-{step:08d}-{os.getpid()}"
        try:
            temporary.mkdir()
            write_contents(temporary, step, tensors, plain, files, self.shard_bytes)
            write_synced(pointer, f"{_step_name(step)}\n".encode())
            os.rename(temporary, self.path(step))
            sync_directory(self.directory)
            os.rename(pointer, self.directory / POINTER_NAME)
            sync_directory(self.directory)
        except BaseException as error:
            remove(temporary)
            remove(pointer)
            if isinstance(error, OSError) or isinstance(error.__cause__, OSError):
                raise OutsizeError(self._failure(step, error)) from error
            raise
        self._remove_old()
        return self.path(step)

    def keep(self, step: int, name: str) -> None:
        """Keep the checkpoint of a step under a name, as a link, until another one has it."""
        link = self.directory / f".link-{step:08d}-{os.getpid()}"
        try:
            link.symlink_to(_step_name(step), target_is_directory=True)
            os.rename(link, self.directory / name)
            sync_directory(self.directory)
        except OSError as error:
            remove(link)
            raise OutsizeError(
                f"cannot keep step {step} as {self.directory / name}: {error.strerror}; it is saved"
            ) from error
        self._remove_old()

    def ready(self, step: int) -> None:
        """Become the one writer. Refuse to save over a whole checkpoint; set anything else under
        its name aside."""
        self.acquire()
        place = self.path(step)
        if not os.path.lexists(place):
            return
        try:
            self._open(step).verify()
        except DamageError:
            aside = (place.with_name(f"damaged-{place.name}-{n}") for n in range(1 << 20))
            os.rename(place, next(path for path in aside if not os.path.lexists(path)))
            return
        raise OutsizeError(
            f"step {step} is already saved in {self.directory}; nothing is saved over: go on from "
            "it, or choose another directory"
        )

    def _failure(self, step: int, error: BaseException) -> str:
        what = str(error)
        if isinstance(error, OSError):
            what = f"cannot write {error.filename or self.directory}: {error.strerror}"
        saved = self.steps()
        if step in saved:
            return f"step {step} is saved, but not safely until it is synced: {what}"
        rest = (
            f"the last checkpoint, step {saved[-1]}, is as it was"
            if saved
            else ("there is no earlier checkpoint")
        )
        return f"step {step} was not saved: {what}; {rest}"

    def _remove_old(self) -> None:
        if self.keep_last is None:
            return
        named = _named(self.directory)
        for step in (one for one in self.steps()[: -self.keep_last] if one not in named):
            # renamed first: what a kill leaves of it must not look like a damaged checkpoint
            going = self.directory / f".removing-{step:08d}-{os.getpid()}"
            try:
                os.rename(self.path(step), going)
                shutil.rmtree(going)
            except OSError as error:
                raise OutsizeError(
                    f"cannot remove the old checkpoint {self.path(step)}: {error.strerror}; the "
                    "new one is saved: see to the directory's permissions"
                ) from error

    # --- the directory ----------------------------------------------------------------------------

    def _entries(self) -> list[str]:
        try:
            return sorted(os.listdir(self.directory))
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise OutsizeError(f"cannot read {self.directory}: {error.strerror}") from error

    def _candidates(self) -> list[int]:
        """Steps whose directories are there, valid or not, ascending."""
        steps = (_step_of(name) for name in self._entries())
        return sorted(step for step in steps if step is not None)

    def _is_valid(self, step: int) -> bool:
        try:
            manifest = read_manifest(self.path(step))
        except DamageError:
            return False
        return manifest is not None and manifest.step == step

    @property
    def pointed(self) -> int | None:
        """The step that was saved last, whether or not it is there still."""
        try:
            with (self.directory / POINTER_NAME).open("rb") as file:
                return _step_of(file.read(64).decode("ascii", "replace").rstrip("\n"))
        except OSError:
            return None


def _named(directory: Path) -> set[int]:
    """The steps that are kept under a name."""
    found = (_step_of(os.readlink(link)) for link in directory.iterdir() if link.is_symlink())
    return {step for step in found if step is not None}


def _step_name(step: int) -> str:
    return f"step-{step:08d}"


def _step_of(name: str) -> int | None:
    """The step a directory is named after, None if it is not named as `save` would."""
    match = _STEP.fullmatch(name)
    step = int(match[1]) if match else None
    return step if step is not None and _step_name(step) == name else None


class DirectoryLock:
    """Held from `acquire` to `release` or the end of the process, however that comes: a file with
    a pid in it would outlive a killed process, an flock does not. The pid is there only so that
    the second comer can be told who was first."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / LOCK_NAME
        self._descriptor: int | None = None

    @property
    def held(self) -> bool:
        return self._descriptor is not None

    def acquire(self) -> None:
        """Take the lock, or OutsizeError naming the process that has it; OSError as it comes."""
        if self.held:
            return
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(descriptor, 20, 0).decode("ascii", "replace").strip()
            os.close(descriptor)
            raise OutsizeError(
                f"directory {str(self.path.parent)!r} is in use by process {holder or 'unknown'}; "
                "expected one run at a time: wait for it, end it, or choose another directory"
            ) from None
        except BaseException:
            os.close(descriptor)
            raise
        self._descriptor = descriptor
        self._write_pid(descriptor)
        _drop_in_children(self)

    def release(self) -> None:
        """Let go; nothing happens when it is not held. The file stays: to remove it is a race."""
        if self._descriptor is not None:
            descriptor, self._descriptor = self._descriptor, None
            os.close(descriptor)

    def _write_pid(self, descriptor: int) -> None:
        try:
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        except OSError:  # a full disk: the lock holds all the same, only unnamed
            return


def _drop_in_children(lock: DirectoryLock) -> None:
    """A forked helper shares the lock and would keep it after a killed parent: close it there."""
    reference = weakref.ref(lock)

    def close() -> None:
        held = reference()
        if held is not None:
            held.release()

    os.register_at_fork(after_in_child=close)
