"""The context axis: tokens of rows cut over workers, beside the whole rows of one worker.

With every other feature it meets: the pairs of tests/verify/test_matrix.py.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from piped import numbers
from plain import batches
from streamed import model_of, plan_of
from subjects import SEQUENCE, VOCAB
from threads import play
from verifying import case_of

from outsize.collectives import AXES, Mesh, PretendWorld, parse_mesh
from outsize.data import Batch
from outsize.data.batch import taken
from outsize.errors import OutsizeError
from outsize.models.attention import LocalAttend
from outsize.models.dropout import Noise
from outsize.models.seams import AttendSpec
from outsize.optim import AdamW
from outsize.parallel.execution import execution_of
from outsize.plan import Precision
from outsize.runtime import Job, NativeFlow
from outsize.runtime.recipe import Here, Recipe
from outsize.search import PlanRequest
from outsize.search.candidates import candidates
from outsize.techniques.axes.context import Mirrored, stretches
from outsize.verify import verify


@pytest.mark.parametrize("workers", [2, 3, 5])
def test_every_token_lies_on_one_worker(workers: int) -> None:
    for tokens in range(2 * workers, 6 * workers + 3):
        spans = [stretches(tokens, workers, place) for place in range(workers)]
        every = sorted(t for own in spans for first, last in own for t in range(first, last))
        assert every == list(range(tokens))
        counts = [sum(last - first for first, last in own) for own in spans]
        assert max(counts) - min(counts) <= 1 and counts == sorted(counts, reverse=True)


@pytest.mark.parametrize("workers", [2, 4])
def test_causal_work_is_even(workers: int) -> None:
    """Query t of a row makes t + 1 scores."""
    tokens = 64 * workers
    work = [
        sum(t + 1 for first, last in stretches(tokens, workers, p) for t in range(first, last))
        for p in range(workers)
    ]
    assert max(work) == min(work)


def test_tokens_of_a_batch() -> None:
    ids = torch.arange(20).view(2, 10)
    whole = Batch(ids, ids + 1, ((0, 4, 10), (0, 10)), Noise(0.5, 0, 0, 40))
    spans = ((2, 5), (8, 10))
    part = whole.tokens(spans)
    assert part.ids_BS.tolist() == [[2, 3, 4, 8, 9], [12, 13, 14, 18, 19]]
    assert part.bounds == ((0, 2, 3, 5), (0, 3, 5))
    assert whole.lengths(spans) == (4, 6, 6, 10, 10)
    x_TD = torch.ones(20, 6, dtype=torch.float64)
    assert whole.noise is not None and part.noise is not None
    masked = whole.noise.apply(x_TD, "x").view(2, 10, 6)
    wanted = torch.cat([masked[:, a:b] for a, b in spans], 1).flatten(0, 1)
    assert torch.equal(part.noise.apply(x_TD[:10], "x"), wanted)
    assert torch.equal(part.noise.at(4).apply(x_TD[:6], "x"), wanted[4:])
    assert torch.equal(taken(ids, spans), part.ids_BS)


SIGHTS = {
    "causal": {},
    "window": {"window": 5},
    "capped": {"softcap": 2.0},
    "all of a document": {"causal": False},
    "prefix": {"prefix": 3},
}


@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("sight", SIGHTS.values(), ids=SIGHTS)
def test_attention_is_that_of_whole_rows(sight: dict, workers: int) -> None:
    """Output and gradients, documents that begin and end anywhere, two query heads a key's."""
    rows, tokens, bounds = 2, 17, (0, 3, 16, 17, 29, 34)
    generator = torch.Generator().manual_seed(0)
    whole = [
        torch.randn(rows * tokens, heads, 8, dtype=torch.float64, generator=generator)
        for heads in (4, 2, 2)
    ]
    spec = AttendSpec(0, 0.3, **sight)
    leaves = [x.clone().requires_grad_() for x in whole]
    o = LocalAttend()(*leaves, bounds, spec)
    pull = torch.randn(o.shape, dtype=torch.float64, generator=generator)
    o.backward(pull)

    def run(world):
        cut = execution_of(world.mesh, world).tokens
        assert isinstance(cut, Mirrored)
        spans = cut.spans(tokens)

        def here(x):
            return taken(x.unflatten(0, (rows, tokens)), spans).flatten(0, 1)

        mine = [here(x).clone().requires_grad_() for x in whole]
        out = cut.attend(rows, tokens, bounds)(*mine, (), spec)
        out.backward(here(pull))
        found = [out.detach(), *(x.grad for x in mine)]
        wanted = [here(o.detach()), *(here(x.grad) for x in leaves)]
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)

    play(Mesh(context=workers), run)


def test_frequencies_that_depend_on_the_length_of_documents() -> None:
    scaled = {"rope_type": "dynamic", "factor": 4.0}
    changes = {"rope_scaling": scaled, "max_position_embeddings": 6}
    found = verify(case_of("llama", mesh=Mesh(context=2), changes=changes), own=False)
    assert found.holds, found.exact.worst


def test_one_token_more_than_two_for_each_worker() -> None:
    plan = plan_of("float64", rows=2, microbatch_rows=2, mesh=Mesh(context=SEQUENCE // 2))
    assert plan.mesh.size == SEQUENCE // 2
    with pytest.raises(OutsizeError, match="fewer than two tokens for each worker of the axis"):
        replace(plan, mesh=Mesh(context=SEQUENCE // 2 + 1))


def test_evaluation_and_states_are_those_of_one_worker() -> None:
    data = batches(2, 3, SEQUENCE, VOCAB)
    plan = plan_of("float64", rows=3, microbatch_rows=2, mesh=Mesh(context=2))
    alone = replace(plan, mesh=Mesh())
    job = Job(NativeFlow(model_of("llama", "float64"), alone), alone, Recipe(AdamW(), 0.5))
    wanted = numbers(job, alone, data)

    def run(world):
        flow = NativeFlow(
            model_of("llama", "float64"), plan, execution=execution_of(plan.mesh, world)
        )
        return numbers(Job(flow, plan, Recipe(AdamW(), 0.5), Here(world)), plan, data)

    for steps, *states in play(plan.mesh, run):
        for here, there in zip(steps, wanted[0], strict=True):
            assert here == pytest.approx(there, rel=1e-10)
        for mine, theirs in zip(states, wanted[1:], strict=True):
            for name in theirs:
                torch.testing.assert_close(mine[name], theirs[name], rtol=1e-10, atol=1e-10)


def test_what_does_not_go_with_it_is_refused() -> None:
    chunked = {"sequence_chunk": 4, "mesh": Mesh(context=2, expert=2)}
    with pytest.raises(OutsizeError, match="sequence_chunk is 4, and one axis of the mesh cuts"):
        plan_of("float64", rows=2, microbatch_rows=1, **chunked)
    with pytest.raises(OutsizeError, match="'contxt'; did you mean 'context'"):
        parse_mesh("contxt=2")
    assert AXES.get("context").cuts == "tokens"


def test_adopted_modules_are_refused() -> None:
    import outsize

    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(3)))
    with pytest.raises(OutsizeError, match="context is 2, but Sequential is an adopted module"):
        outsize.prepare(model, "adamw", mesh="context=2")


def test_an_execution_of_one_worker_cuts_nothing() -> None:
    assert execution_of(Mesh(tensor=2), PretendWorld(Mesh(tensor=2))).axis is None


def test_the_planner_takes_chunks_of_the_tokens_of_a_worker() -> None:
    request = PlanRequest(1, 4096, Precision.named("float32"), AdamW())
    for mesh, chunks in ((Mesh(), {0, 512, 128}), (Mesh(context=2), {0, 256, 64})):
        made = candidates(replace(request, mesh=mesh), 4)
        assert {plan.sequence_chunk for plan in made} == chunks
