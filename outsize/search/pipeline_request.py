"""How the pipeline axis of a run plays: its schedule, its microbatches, where its stages begin.

What cannot be is refused before anything is made, with the nearest that holds. What the user left
open follows from the rows of a step and from the costs of the model's stages.
"""

from __future__ import annotations

from dataclasses import replace

from outsize.errors import OutsizeError, counted
from outsize.plan import Pipelined, Plan, Rest, Sharding
from outsize.plan.approximate import PARTIAL, check_axes
from outsize.plan.spread import AUTO
from outsize.runtime.method import method_of
from outsize.schedule.pipelines import Pipeline, Shape, named
from outsize.search.request import SCHEDULE, PlanRequest

AHEAD = 2  # microbatches for each worker: with one, a worker waits for about half of a step
_FITS_ALL = Shape(4, 16)  # conditions of every schedule hold
_PLENTY = 4  # microbatches for each worker, so that there are enough for every schedule


def check(request: PlanRequest, segments: int) -> None:
    """Refuse a pipeline that cannot be, or what would do nothing on the mesh, before anything is
    made of the model."""
    _known(request)
    check_axes(request.approximate, request.mesh)
    if request.mesh.pipeline == 1:
        return
    if request.searched and not method_of(request.approximate).rehearsed:
        raise OutsizeError(
            f"plan.pipeline is {AUTO!r} and plan.approximate holds {request.approximate[0]}, whose"
            f" steps have no backward passes to place: set plan.pipeline to {SCHEDULE}, or leave"
            " one of them out"
        )
    _check_stages(request, segments)
    row_choices(request)


def row_choices(request: PlanRequest) -> list[int]:
    """Rows of a microbatch: what makes AHEAD microbatches for each worker, or as many as there are
    rows for; then ever fewer. As the user says, where he does.

    OutsizeError where there are too few for the pipeline or its schedule.
    """
    workers, own = request.mesh.pipeline, -(-request.rows // request.mesh.rows)
    least = request.rows // request.mesh.rows
    if request.few and request.microbatch_rows is not None:
        return [min(request.microbatch_rows, own)]
    if request.microbatch_rows is not None:
        rows = min(request.microbatch_rows, own)
        if _count(request, rows) < workers <= least:
            raise OutsizeError(
                f"plan.microbatch_rows is {request.microbatch_rows}, which makes"
                f" {counted(_count(request, rows), 'microbatch')}; a pipeline of {workers} workers"
                " needs as"
                f" many at least: set it to {own // workers}, or leave it out"
            )
    if least < workers:
        raise _few_rows(request, least)
    if request.microbatch_rows is not None:
        _made(request, rows)
        return [rows]
    return _holding(request, own)


def playing(request: PlanRequest) -> Pipelined:
    """The schedule of plans, whose cuts are open."""
    return request.schedule if request.mesh.pipeline > 1 else Pipelined()


def check_cut(request: PlanRequest) -> None:
    """Refuse ends that are to be cut over the workers of a pipeline that is not there. A run that
    goes on with one worker leaves them whole."""
    if (cut := request.schedule.ends) and request.mesh.pipeline == 1:
        raise OutsizeError(
            f"plan.pipeline is {request.schedule.said!r} and mesh.pipeline is 1: a {cut[0]} is"
            " cut over the workers of a pipeline; set mesh to pipeline=2, or plan.pipeline to"
            f" {_name(request)}"
        )


def continued(plan: Plan, request: PlanRequest, shards: Sharding) -> Plan:
    """The plan of a run that goes on with the workers that there are now. With others its states
    rest on the device, and on another pipeline its microbatches are smaller where they would be too
    few. OutsizeError where microbatches would leave out other stages than before."""
    line, stages, rows, order, update, stream = (
        playing(request), plan.stages, plan.microbatch_rows, plan.order, plan.update, plan.stream
    )  # fmt: skip
    same = (plan.mesh, plan.rows) == (request.mesh, request.rows) and kept(plan, request)
    if same:
        line = plan.pipeline
    elif PARTIAL in request.approximate:
        raise OutsizeError(
            f"plan.approximate holds {PARTIAL}: which stages are left out follows from the mesh and"
            f" the schedule; keep mesh {plan.mesh} and plan.pipeline {plan.pipeline.schedule}"
        )
    if not same:
        stages = tuple(replace(stage, rest=Rest(), spill=()) for stage in stages)
        rows = min(rows, -(-request.rows // request.mesh.rows))
    if not same and request.mesh.pipeline > 1:
        rows, order, update = rows_like(request, rows), "microbatch", "apart"
    settings = request.settings.weighed(plan.settings) if same else request.settings
    if not same or shards != plan.shards:  # other rooms pass through the pool
        stream = replace(stream, pool=0)
    return replace(
        plan, budget=request.budget, mesh=request.mesh, shards=shards, pipeline=line, stages=stages,
        sequence_parallel=_between(plan, request), microbatch_rows=rows, order=order,
        update=update, loss_chunk=0 if line.ends and not plan.pipeline.ends else plan.loss_chunk,
        stream=stream, settings=settings.having(dict(plan.settings.summing().said)),
        row_shares=plan.row_shares if same else (),
    )  # fmt: skip


def _between(plan: Plan, request: PlanRequest) -> bool:
    """Whether tokens between branches stay cut over the tensor axis, where nobody says."""
    if request.sequence_parallel is None:
        return plan.sequence_parallel and request.mesh.tensor > 1
    return request.sequence_parallel


def kept(plan: Plan, request: PlanRequest) -> bool:
    """Whether the plan plays its pipeline as is requested."""
    line = playing(request)
    if (request.searched or request.pipeline is None) and plan.mesh.pipeline > 1:
        return plan.pipeline.ends == line.ends
    return plan.pipeline.said == line.said


def rows_like(request: PlanRequest, rows: int) -> int:
    """As many rows of a microbatch, or what the pipeline needs."""
    try:
        return row_choices(replace(request, microbatch_rows=rows))[0]
    except OutsizeError:
        return row_choices(request)[0]


# -- what cannot be --------------------------------------------------------------------------------


def _check_stages(request: PlanRequest, segments: int) -> None:
    """Refuse more stages than the model has segments."""
    workers = request.mesh.pipeline
    coarse = _named(request, _PLENTY * workers)
    stages = coarse.placement.stages
    if coarse.approximate and PARTIAL not in request.approximate:
        raise OutsizeError(
            f"plan.pipeline is {_name(request)!r}, which changes the maths ({coarse.approximate}):"
            f" name {PARTIAL} under plan.approximate, or choose another"
        )
    cuttable = segments - bool(coarse.paths)  # the head goes with the last block there
    if stages <= cuttable:
        return
    most = cuttable * workers // stages
    while most > 1 and not _holds(request, most):
        most -= 1
    raise OutsizeError(
        f"mesh.pipeline is {workers}: {_name(request)} cuts the model into {stages} stages, and it"
        f" has {segments} segments (prologue, {counted(segments - 2, 'block')}, epilogue); a stage"
        " without"
        f" blocks cannot run: expected mesh.pipeline {max(1, most)} at most"
    )


def _few_rows(request: PlanRequest, least: int) -> OutsizeError:
    """Fewer rows than workers of the pipeline."""
    mesh = request.mesh
    axes = " and ".join(mesh.cutting("rows"))
    each = f" to each of {mesh.rows} places of the {axes} axis" if mesh.rows > 1 else ""
    enough = mesh.pipeline * mesh.rows * max(1, request.sequence)
    return OutsizeError(
        f"mesh.pipeline is {mesh.pipeline}: a step has {counted(request.rows, 'row')}, which makes"
        f" {counted(least, 'microbatch')} at most{each}, and a pipeline needs as many as it has"
        " workers;"
        f" set train.batch_tokens to {enough}, or mesh.pipeline to {max(1, least)}"
    )


# -- schedules and rows ----------------------------------------------------------------------------


def _name(request: PlanRequest) -> str:
    return request.schedule.schedule


def _made(request: PlanRequest, rows: int) -> Pipeline:
    """The schedule of microbatches of so many rows. OutsizeError: a condition does not hold."""
    return _named(request, _count(request, rows))


def _named(request: PlanRequest, count: int) -> Pipeline:
    workers = request.mesh.pipeline
    try:
        return named(_name(request), Shape(workers, count))
    except OutsizeError as error:
        raise OutsizeError(
            f"plan.pipeline is {_name(request)!r}, for {workers} workers and"
            f" {counted(count, 'microbatch')}: {error}"
        ) from None


def _known(request: PlanRequest) -> None:
    """Refuse the name of no schedule, also where it is not used."""
    try:
        named(_name(request), _FITS_ALL)
    except OutsizeError as error:
        raise OutsizeError(f"plan.pipeline: {error}") from None


def _holds(request: PlanRequest, workers: int) -> bool:
    """Whether the schedule can be played on so many workers."""
    fewer = replace(request, mesh=request.mesh.having(pipeline=workers), microbatch_rows=None)
    try:
        row_choices(fewer)
    except OutsizeError:
        return False
    return True


def _count(request: PlanRequest, rows: int) -> int:
    """Microbatches of a step, as a plan counts them."""
    own = -(-request.rows // request.mesh.rows)
    return min(-(-own // rows), request.rows // request.mesh.rows)


def _most_rows(request: PlanRequest, own: int) -> int:
    """The most rows of a microbatch of which there are as many as workers."""
    return next(r for r in range(own, 0, -1) if _count(request, r) >= request.mesh.pipeline)


def _holding(request: PlanRequest, own: int) -> list[int]:
    """Rows of a microbatch for which the conditions of the schedule hold."""
    workers = request.mesh.pipeline
    wanted = max(1, own // (AHEAD * workers))
    halves = [wanted]
    while halves[-1] > 1:
        halves.append(halves[-1] // 2)
    others = sorted(set(range(1, _most_rows(request, own) + 1)) - set(halves), key=lambda r: -r)
    first: OutsizeError | None = None
    found: list[int] = []
    for rows in (*halves, *others):
        if found and rows not in halves:
            break
        try:
            _made(request, rows)
        except OutsizeError as error:
            first = first or error
        else:
            found.append(rows)
    if found:
        return found
    assert first is not None
    raise first
