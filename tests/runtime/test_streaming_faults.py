"""Faults while a step streams: one clear line, nothing hangs, and the job says if it can go on.

Before the first update a step that fails leaves everything as it was, and the next one is exact.
After it some weights have moved and some have not: a checkpoint must be loaded.
"""

from __future__ import annotations

import _thread
import errno
import os
import random
import signal
import threading
import time
from dataclasses import replace

import pytest
import streamed
import torch
from engines import intercept, no_lane_runs
from streamed import ALL, PIECE, data_of, disk, job_of, memory, plan_of, resting, snapshot, trained
from subjects import ROWS

from outsize.errors import OutsizeError
from outsize.memory import Ledger, OverBudget
from outsize.memory.disk import DiskStore
from outsize.memory.store import MemoryStore
from outsize.plan import Stream
from outsize.plan.plan import per_segment
from outsize.schedule import Kind

DATA = data_of(2)
PLANS = {
    "layers": ({"order": "layer"}, ALL, {}),
    "behind": ({"order": "layer", "update": "behind", "stages": per_segment(5, ("block",))},
               ALL, {}),
    "host": ({}, dict.fromkeys(ALL, "host"), {"host": 2}),
}  # fmt: skip


class Fragile(MemoryStore):
    """A tier on which the operation of a number goes wrong, once: `at` counts from then on."""

    def __init__(self, name: str) -> None:
        super().__init__(name, 1 << 26)
        self.operations, self.at, self.wrong = 0, -1, self.fails
        self._counting = threading.Lock()  # two lanes are here at once

    def fails(self) -> None:
        raise OutsizeError(f"tier {self.name!r}: reading from /disk failed (Input/output error)")

    def _count(self) -> None:
        with self._counting:
            self.operations += 1
            due = self.operations == self.at
        if due:
            self.wrong()

    def write(self, place, data, at=0) -> None:
        self._count()
        super().write(place, data, at)

    def read(self, place, out, at=0) -> None:
        self._count()
        super().read(place, out, at)


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    streamed.small(monkeypatch, 4 * PIECE)


def made(name: str, stores, ledger=None):
    changes, rest, stream = PLANS[name]
    plan = plan_of(**changes)
    if stores:
        plan = replace(resting(plan, **rest), stream=Stream(part=4 * PIECE, **stream))
    clip = None if plan.update == "behind" else 0.5
    return job_of(plan, stores, clip=clip, ledger=ledger)


@pytest.fixture(scope="module")
def twins():
    return {}


def twin(twins, name: str):
    if name not in twins:
        twins[name] = trained(made(name, {}), DATA, ROWS)
    return twins[name]


def same(one, other) -> bool:
    return all(torch.equal(a[n], b[n]) for a, b in zip(one, other, strict=True) for n in a)


def check_says_whether_it_goes_on(job, before, expected, counts) -> bool:
    """After a fault: untouched and exact, or refused. Gives which."""
    assert no_lane_runs()
    parts = job.method
    assert not parts.microbatches.under_way and not parts.spilling.missing
    assert not job.method.gradients.touched
    try:
        job_torn = parts.update.torn
        if not job_torn:
            assert same(snapshot(job), before), "weights and states as they were"
        found = trained(job, DATA, ROWS)
    except OutsizeError as error:
        assert job_torn and "cut off while it updated the weights; load" in str(error)
        # What was saved is not lost: loaded, the job is as it was.
        weights, states = before
        job.load(lambda n, out: out.copy_(weights[n]), lambda n, out: out.copy_(states[n]))
        job.restore_counts(counts)
        assert same(snapshot(job), before)
        found = trained(job, DATA, ROWS)
    assert expected.differences(found) == []
    return job_torn


@pytest.fixture(autouse=True)
def interruptible():
    """A process that was started in the background ignores SIGINT."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize(
    ("name", "what"),
    [("layers", "error"), ("layers", "interrupt"), ("behind", "interrupt"), ("host", "error")],
)
def test_a_fault_at_any_operation(name, what, twins):
    """Also in the very first step, where some optimizer states were never written."""
    expected = twin(twins, name)
    stores = {key: Fragile(key) for key in ("disk", "host")}
    store = stores["host" if name == "host" else "disk"]
    job = made(name, stores)
    begun = store.operations
    made(name, others := {key: Fragile(key) for key in ("disk", "host")}).step(DATA[0], 1e-2)
    total = others[store.name].operations - begun

    def interrupt() -> None:
        _thread.interrupt_main()
        time.sleep(5e-3)

    if what == "interrupt":
        store.wrong = interrupt
    kinds, rng = set(), random.Random(f"{name} {what}")
    places = [rng.randint(1, int(total * share)) for share in (0.3, 0.9)]
    for place in (1, *places, int(total * 0.95)):
        before, counts = snapshot(job), job.update_counts()
        store.at = store.operations + place
        with pytest.raises((OutsizeError, KeyboardInterrupt)) as caught:
            job.step(DATA[0], 1e-2)
            time.sleep(0.05)  # an interrupt at the very end comes a little later
            raise KeyboardInterrupt("after the step")
        store.at = -1
        if what == "error":
            assert "Input/output error" in str(caught.value) and "\n" not in str(caught.value)
        if "after the step" not in str(caught.value):
            kinds.add(check_says_whether_it_goes_on(job, before, expected, counts))
        stores = {key: Fragile(key) for key in ("disk", "host")}
        store, job = stores[store.name], made(name, stores)
        store.wrong = interrupt if what == "interrupt" else store.fails
    assert kinds == {True, False}, "before the first update and after it"


@pytest.mark.parametrize("kind", [Kind.FORWARD, Kind.BACKWARD, Kind.NORM])
def test_an_interrupt_between_actions_that_compute(kind, twins):
    """As tests/runtime/test_abandoned_step.py, with everything below the device."""
    expected = twin(twins, "layers")
    with memory() as stores:
        job = made("layers", stores)
        before, calls = snapshot(job), []

        def interrupted(action, plainly) -> None:
            calls.append(action)
            plainly()
            if kind is Kind.NORM or len(calls) == 7:
                raise KeyboardInterrupt

        plain = intercept(job, kind, interrupted)
        with pytest.raises(KeyboardInterrupt):
            job.step(DATA[0], 1e-2)
        job.loaded = plain
        assert not check_says_whether_it_goes_on(job, before, expected, {})


def test_faults_while_nothing_is_trained(twins):
    """An evaluation that loses its tier, and weights that are read: the job goes on after."""
    expected = twin(twins, "layers")
    stores = {"disk": Fragile("disk")}
    job = made("layers", stores)
    for ask in (lambda: job.evaluate(DATA[0], ROWS), lambda: dict(job.weights())):
        stores["disk"].at = stores["disk"].operations + 3
        with pytest.raises(OutsizeError, match="Input/output error"):
            ask()
    assert expected.differences(trained(job, DATA, ROWS)) == []


@pytest.mark.parametrize("share", [0.4, 1.0])
def test_a_budget_that_is_exceeded(share, twins):
    expected = twin(twins, "layers")
    with memory() as stores, memory() as others:
        ledger = Ledger()
        job = made("layers", others, ledger)
        static = ledger.total
        job.step(DATA[0], 1e-2)
        peak = job.report.trace.peak()
        ledger = Ledger(static + int((peak - static) * share) - 1)
        job = made("layers", stores, ledger)
        before = snapshot(job)
        with pytest.raises(OverBudget, match=r"bytes? missing") as caught:
            job.step(DATA[0], 1e-2)
        assert caught.value.missing > 0
        del caught
        ledger.budget = None
        assert not check_says_whether_it_goes_on(job, before, expected, {})


# -- disks -----------------------------------------------------------------------------------------


def test_a_disk_that_is_too_small_is_refused_at_construction(tmp_path):
    store = DiskStore("disk", [tmp_path], 1 << 16)
    try:
        with pytest.raises(OutsizeError, match=r"tier 'disk': .* missing; declare a larger tier"):
            job_of(resting(plan_of(), **ALL), {"disk": store})
    finally:
        store.close()
    assert not list(tmp_path.iterdir()), "no garbage"


def test_a_disk_without_room_for_activations_says_so_in_the_step(tmp_path, twins):
    """Their places are reserved as they come: the first step finds out, and nothing is lost."""
    plan = resting(plan_of(order="layer"), activations="host")
    store = MemoryStore("host", 1 << 13)
    job = job_of(plan, {"host": store})
    before = snapshot(job)
    with pytest.raises(OutsizeError, match=r"tier 'host': .* missing") as caught:
        job.step(DATA[0], 1e-2)
    assert "\n" not in str(caught.value) and no_lane_runs()
    assert same(snapshot(job), before)


def test_a_byte_that_was_altered_ends_the_step(tmp_path, monkeypatch):
    monkeypatch.undo()  # parts as a disk has them
    with disk(tmp_path) as stores:
        job = job_of(resting(plan_of(order="layer"), **ALL), stores)
        job.step(DATA[0], 1e-2)
        place, begin = job.weight_pool.homes.known[0, "parameters"].at(0)
        handle = stores["disk"]._files[0].handle
        other = os.open(f"/proc/self/fd/{handle}", os.O_RDWR)
        try:
            byte = os.pread(other, 1, place.offset + begin + 77)
            os.pwrite(other, bytes([byte[0] ^ 4]), place.offset + begin + 77)
        finally:
            os.close(other)
        with pytest.raises(OutsizeError, match="are not those that were written") as caught:
            for batch in DATA:
                job.step(batch, 1e-2)
        assert "\n" not in str(caught.value)
        with pytest.raises(OutsizeError):
            job.step(DATA[0], 1e-2)
    assert no_lane_runs() and not list(tmp_path.iterdir())


def test_an_error_of_the_disk_ends_the_step(tmp_path, monkeypatch):
    monkeypatch.undo()
    from outsize.memory import disk as disk_module

    with disk(tmp_path) as stores:
        job = job_of(resting(plan_of(order="layer"), **ALL), stores)
        before = snapshot(job)
        plainly = disk_module.write_all

        def full(handle, data, offset, direct):
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(disk_module, "write_all", full)
        with pytest.raises(OutsizeError, match="No space left on device") as caught:
            job.step(DATA[0], 1e-2)
        assert "\n" not in str(caught.value)
        monkeypatch.setattr(disk_module, "write_all", plainly)
        with pytest.raises(OutsizeError, match=r"No space left|load a checkpoint"):
            job.step(DATA[0], 1e-2)
        assert len(before[0]) == len(job.owners)
    assert no_lane_runs() and not list(tmp_path.iterdir())
