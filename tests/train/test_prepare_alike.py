"""Where one worker of `prepare` is refused, all are, in the same words, and none waits."""

from __future__ import annotations

import pytest
from pipeline_workers import batches, count, loss, model_of
from pipeline_workers import refused as refused_alone
from torch.distributed import TCPStore
from torchrun import started

import outsize
from outsize.collectives import Mesh, parse_mesh
from outsize.collectives.threads import play
from outsize.errors import OutsizeError

BATCH = next(iter(batches("own")))


def rows(stop: int, changed: int = 0):
    made = {name: BATCH[name][:stop] for name in ("input_ids", "labels")}
    return made | {"input_ids": made["input_ids"] + changed}


ROWS = rows(4)


def refused(near, mesh, do) -> list[str]:
    """What each worker is told."""

    def work(world):
        with pytest.raises(OutsizeError) as caught:
            do(world.rank)
        return str(caught.value)

    said = play(mesh, near(work))
    assert len(set(said)) == 1, said
    return said


def job_of(**changes):
    settings = {"loss": loss, "count": count, "mesh": "data=2"} | changes
    return outsize.prepare(model_of("own"), "adamw", **settings)


@pytest.mark.parametrize("worker", [0, 1])
def test_a_batch(near, worker) -> None:
    """Empty before there is a job, and later; all go on after it."""

    def do(rank):
        job, empty = job_of(), rows(0)
        mine = empty if rank == worker else ROWS
        with pytest.raises(OutsizeError, match="batch is empty"):
            job.step(mine)
        first = float(job.step(ROWS))
        for call in (job.step, job.evaluate):
            with pytest.raises(OutsizeError, match="batch is empty"):
                call(mine)
        assert float(job.step(ROWS)) < first
        job.step(mine)

    assert "batch is empty" in refused(near, Mesh(data=2), do)[0]


def test_other_numbers_of_rows(near) -> None:
    def do(rank):
        job_of().step(rows(3 + rank))

    assert "have 3 to 4 rows" in refused(near, Mesh(data=2), do)[0]


def test_other_rows_than_a_neighbours_on_one_of_two_axes(near) -> None:
    """Those on the other place of the data axis had the same rows."""
    mesh = parse_mesh("data=2,pipeline=2")

    def do(rank):
        job = job_of(mesh=str(mesh), microbatches=2)
        job.step(rows(4, rank == 3))

    assert "different rows" in refused(near, mesh, do)[0]


def test_memory_and_states(near, tmp_path) -> None:
    """What only one is short of, and what only one was given."""

    def do(rank):
        job = job_of(memory=4096 if rank else 1 << 20)
        job.step(ROWS)

    assert "is too small" in refused(near, Mesh(data=2), do)[0]

    def states(rank):
        job = job_of()
        job.step(ROWS)
        state = job.state_dict()
        if rank:
            state["weights"].pop(next(iter(state["weights"])))
        job.load_state_dict(state)

    assert "lacks tensor" in refused(near, Mesh(data=2), states)[0]


def test_where_the_others_would_wait() -> None:
    """In processes, of which one is refused inside `prepare`, before a step, or in the middle of
    one: the others stop at once, in its words, and those of its loss end the run for both."""
    agent = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    told = started(refused_alone, 2, agent.port)()
    for said in zip(*told, ("clip is -1.0", "lr is -1.0", "this loss is lost"), strict=True):
        assert said[2] in said[0] and said[2] in said[1]
