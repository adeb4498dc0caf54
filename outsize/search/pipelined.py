"""How the pipeline axis of a run plays: its schedule, its microbatches, where its stages begin.

What cannot be is refused before anything is made, with the nearest that holds. What the user left
open follows from the rows of a step and from the costs of the model's stages.
"""

from __future__ import annotations

from dataclasses import replace

from outsize.errors import OutsizeError
from outsize.plan import Pipelined, Plan, Rest, Sharding
from outsize.plan.approximate import PARTIAL
from outsize.plan.spread import pipelined
from outsize.schedule import Kind
from outsize.schedule.pipelines import Pipeline, Shape, named
from outsize.schedule.schedule import Schedule
from outsize.search.wish import Wish

SCHEDULE = "1f1b"  # as short a step as GPipe's, and it holds fewer microbatches
AHEAD = 2  # microbatches for each worker: with one, a worker waits for about half of a step
_FITS_ALL = Shape(4, 16)  # conditions of every schedule hold
_PLENTY = 4  # microbatches for each worker, so that there are enough for every schedule


def check(wish: Wish, segments: int) -> None:
    """Refuse a pipeline that cannot be, before anything is made of the model."""
    _known(wish)
    if wish.mesh.pipeline == 1:
        return
    _check_others(wish)
    _check_stages(wish, segments)
    row_choices(wish)


def row_choices(wish: Wish) -> list[int]:
    """Rows of a microbatch: what makes AHEAD microbatches for each worker, or as many as there are
    rows for; then ever fewer. As the user says, where he does.

    OutsizeError where there are too few for the pipeline or its schedule.
    """
    workers, own = wish.mesh.pipeline, -(-wish.rows // wish.mesh.data)
    least = wish.rows // wish.mesh.data
    if wish.microbatch_rows is not None:
        rows = min(wish.microbatch_rows, own)
        if _count(wish, rows) < workers <= least:
            raise OutsizeError(
                f"plan.microbatch_rows is {wish.microbatch_rows}, which makes"
                f" {_microbatches(_count(wish, rows))}; a pipeline of {workers} workers needs as"
                f" many at least: set it to {own // workers}, or leave it out"
            )
    if least < workers:
        raise _few_rows(wish, least)
    if wish.microbatch_rows is not None:
        _made(wish, rows)
        return [rows]
    return _holding(wish, own)


def playing(wish: Wish) -> Pipelined:
    """The schedule of plans, whose cuts are open."""
    return _said(wish) if wish.mesh.pipeline > 1 else Pipelined()


def check_cut(wish: Wish) -> None:
    """Refuse a vocabulary that is to be cut over the workers of a pipeline that is not there. A run
    that goes on with one worker leaves it whole."""
    if _said(wish).vocabulary and wish.mesh.pipeline == 1:
        raise OutsizeError(
            f"plan.pipeline is {wish.pipeline!r} and mesh.pipeline is 1: a vocabulary is cut over"
            f" the workers of a pipeline; set mesh to pipeline=2, or plan.pipeline to {_name(wish)}"
        )


def continued(plan: Plan, wish: Wish, shards: Sharding) -> Plan:
    """The plan of a run that goes on with the workers that there are now. With others its states
    rest on the device, and on another pipeline its microbatches are smaller where they would be too
    few. OutsizeError where microbatches would leave out other stages than before."""
    line, stages, rows, order, update, stream = (
        playing(wish), plan.stages, plan.microbatch_rows, plan.order, plan.update, plan.stream
    )  # fmt: skip
    same = (plan.mesh, plan.rows, plan.pipeline.said) == (wish.mesh, wish.rows, line.said)
    if same:
        line = plan.pipeline
    elif PARTIAL in wish.approximate:
        raise OutsizeError(
            f"plan.approximate holds {PARTIAL}: which stages are left out follows from the mesh and"
            f" the schedule; keep mesh {plan.mesh} and plan.pipeline {plan.pipeline.schedule}"
        )
    if not same:
        stages = tuple(replace(stage, rest=Rest(), spill=()) for stage in stages)
        rows = min(rows, -(-wish.rows // wish.mesh.data))
    if not same and wish.mesh.pipeline > 1:
        rows, order, update = rows_like(wish, rows), "microbatch", "apart"
    if not same or shards != plan.shards:  # other rooms pass through the pool
        stream = replace(stream, pool=0)
    return replace(
        plan, budget=wish.budget, mesh=wish.mesh, shards=shards, pipeline=line, stages=stages,
        sequence_parallel=wish.sequence_parallel, overlap=wish.overlap, microbatch_rows=rows,
        order=order, update=update, loss_chunk=0 if line.vocabulary else plan.loss_chunk,
        stream=stream,
    )  # fmt: skip


def rows_like(wish: Wish, rows: int) -> int:
    """As many rows of a microbatch, or what the pipeline needs."""
    try:
        return row_choices(replace(wish, microbatch_rows=rows))[0]
    except OutsizeError:
        return row_choices(wish)[0]


def splits(wish: Wish) -> bool:
    """Whether the schedule has the gradients of inputs and of weights apart."""
    return wish.mesh.pipeline > 1 and _split(_made(wish, row_choices(wish)[0]).schedule)


def _split(schedule: Schedule) -> bool:
    return any(a.kind is Kind.BACKWARD_WEIGHT for actions in schedule.workers for a in actions)


# -- what cannot be --------------------------------------------------------------------------------


def _check_others(wish: Wish) -> None:
    """What does not go with a pipeline."""
    workers = f"mesh.pipeline is {wish.mesh.pipeline}"
    alone = [name for name in wish.approximate if name not in ("bfloat16-weights", PARTIAL)]
    if alone:
        raise OutsizeError(
            f"{workers} and plan.approximate holds {alone[0]}, which runs on one worker; leave it"
            " out, or take the mesh to 1"
        )


def _check_stages(wish: Wish, segments: int) -> None:
    """Refuse more stages than the model has segments."""
    workers = wish.mesh.pipeline
    coarse = _named(wish, _PLENTY * workers)
    stages = coarse.placement.stages
    if coarse.approximate and PARTIAL not in wish.approximate:
        raise OutsizeError(
            f"plan.pipeline is {_name(wish)!r}, which changes the maths ({coarse.approximate}):"
            f" name {PARTIAL} under plan.approximate, or choose another"
        )
    if _split(coarse.schedule) and wish.sequence_chunk:
        raise OutsizeError(
            f"plan.pipeline is {_name(wish)!r}, which has gradients of weights apart, and"
            f" plan.sequence_chunk is {wish.sequence_chunk}: they would hold every chunk; set it to"
            " 0, or plan.pipeline to 1f1b"
        )
    cuttable = segments - bool(coarse.paths)  # the head goes with the last block there
    if stages <= cuttable:
        return
    most = cuttable * workers // stages
    while most > 1 and not _holds(wish, most):
        most -= 1
    raise OutsizeError(
        f"mesh.pipeline is {workers}: {_name(wish)} cuts the model into {stages} stages, and it has"
        f" {segments} segments (prologue, {segments - 2} blocks, epilogue); a stage without blocks"
        f" cannot run: expected mesh.pipeline {max(1, most)} at most"
    )


def _microbatches(count: int) -> str:
    return "1 microbatch" if count == 1 else f"{count} microbatches"


def _few_rows(wish: Wish, least: int) -> OutsizeError:
    """Fewer rows than workers of the pipeline."""
    mesh = wish.mesh
    each = f" to each of {mesh.data} places of the data axis" if mesh.data > 1 else ""
    enough = mesh.pipeline * mesh.data * max(1, wish.sequence)
    return OutsizeError(
        f"mesh.pipeline is {mesh.pipeline}: a step has {wish.rows} rows, which makes"
        f" {_microbatches(least)} at most{each}, and a pipeline needs as many as it has workers;"
        f" set train.batch_tokens to {enough}, or mesh.pipeline to {max(1, least)}"
    )


# -- schedules and rows ----------------------------------------------------------------------------


def _said(wish: Wish) -> Pipelined:
    return pipelined(wish.pipeline or SCHEDULE)


def _name(wish: Wish) -> str:
    return _said(wish).schedule


def _made(wish: Wish, rows: int) -> Pipeline:
    """The schedule of microbatches of so many rows. OutsizeError: a condition does not hold."""
    return _named(wish, _count(wish, rows))


def _named(wish: Wish, count: int) -> Pipeline:
    workers = wish.mesh.pipeline
    try:
        return named(_name(wish), Shape(workers, count))
    except OutsizeError as error:
        raise OutsizeError(
            f"plan.pipeline is {_name(wish)!r}, for {workers} workers and {_microbatches(count)}:"
            f" {error}"
        ) from None


def _known(wish: Wish) -> None:
    """Refuse the name of no schedule, also where it is not used."""
    try:
        named(_name(wish), _FITS_ALL)
    except OutsizeError as error:
        raise OutsizeError(f"plan.pipeline: {error}") from None


def _holds(wish: Wish, workers: int) -> bool:
    """Whether the schedule can be played on so many workers."""
    fewer = replace(wish, mesh=replace(wish.mesh, pipeline=workers), microbatch_rows=None)
    try:
        row_choices(fewer)
    except OutsizeError:
        return False
    return True


def _count(wish: Wish, rows: int) -> int:
    """Microbatches of a step, as a plan counts them."""
    own = -(-wish.rows // wish.mesh.data)
    return min(-(-own // rows), wish.rows // wish.mesh.data)


def _most_rows(wish: Wish, own: int) -> int:
    """The most rows of a microbatch of which there are as many as workers."""
    return next(r for r in range(own, 0, -1) if _count(wish, r) >= wish.mesh.pipeline)


def _holding(wish: Wish, own: int) -> list[int]:
    """Rows of a microbatch for which the conditions of the schedule hold."""
    workers = wish.mesh.pipeline
    wanted = max(1, own // (AHEAD * workers))
    halves = [wanted]
    while halves[-1] > 1:
        halves.append(halves[-1] // 2)
    others = sorted(set(range(1, _most_rows(wish, own) + 1)) - set(halves), key=lambda r: -r)
    first: OutsizeError | None = None
    found: list[int] = []
    for rows in (*halves, *others):
        if found and rows not in halves:
            break
        try:
            _made(wish, rows)
        except OutsizeError as error:
            first = first or error
        else:
            found.append(rows)
    if found:
        return found
    assert first is not None
    raise first
