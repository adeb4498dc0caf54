"""Bugs that pipelines invite, planted one by one: verify sees each while the loss looks as it
should, or the validator refuses the list of actions."""

from __future__ import annotations

from dataclasses import replace

import pytest
from verifying import case_of

from outsize.collectives import Mesh
from outsize.collectives.channel import Sender
from outsize.collectives.pretend import PretendWorld
from outsize.errors import OutsizeError
from outsize.kernels import vocabulary as kernels
from outsize.plan import Pipelined
from outsize.runtime import NativeFlow
from outsize.runtime.native import ChainWalk
from outsize.runtime.storage.shard_groups import ShardGroups
from outsize.runtime.totals import Totals
from outsize.schedule import Kind, Schedule, State, prove
from outsize.techniques.vocabulary.rows import Rows, Vocabulary
from outsize.verify import Case, planned, verify

LINE = Mesh(pipeline=2)


def piped(
    schedule: str = "1f1b", family: str = "llama, untied", vocabulary: int = 0, **changes
) -> Case:
    """Four microbatches on two workers."""
    pipeline = Pipelined(schedule, vocabulary=vocabulary)
    return case_of(family, mesh=LINE, rows=4, microbatch_rows=1, pipeline=pipeline, **changes)


def seen(case: Case, monkeypatch, target, name: str, bug):
    """The verdict with a bug planted, which holds without it."""
    assert verify(case, own=False).holds
    monkeypatch.setattr(target, name, bug)
    found = verify(case, own=False).exact
    assert not found.holds()
    return found


def ratios(found) -> dict[str, float]:
    return {row.name: row.ratio for row in found.rows}


@pytest.mark.parametrize("side", [0, 1])
def test_a_tied_embedding_is_summed_on_one_side_only(monkeypatch, side):
    """transformers and Megatron-LM tie ends that lie on two workers by a sum on both."""
    plain = ShardGroups.merge

    def merge(self, index, gradients):
        plain(self, index, gradients if self.chunks.turn == side else gradients.clone())

    found = seen(piped(family="llama"), monkeypatch, ShardGroups, "merge", merge)
    (mine, theirs), *_ = found.losses
    assert mine == pytest.approx(theirs, rel=1e-12), "which looks normal"
    tied = ratios(found)["prologue.tokens.weight"]
    assert (tied == pytest.approx(1, abs=0.2)) == (side == 0)
    assert found.weight > 1e-6


def test_a_microbatch_whose_gradient_is_not_sent(monkeypatch):
    """The earlier stages learn from three microbatches of four."""
    plain, calls = ChainWalk.take_gradient, []

    def take(self, stage):
        calls.append(stage)
        found = plain(self, stage)
        return [None] * len(found) if len(calls) % 4 == 1 else found

    found = seen(piped(steps=1), monkeypatch, ChainWalk, "take_gradient", take)
    (mine, theirs), *_ = found.losses
    assert mine == pytest.approx(theirs, rel=1e-12)
    assert ratios(found)["epilogue.head.weight"] == pytest.approx(1, abs=1e-9)
    assert ratios(found)["prologue.tokens.weight"] < 0.99


def test_an_activation_of_the_microbatch_before_is_sent(monkeypatch):
    """A buffer that is used again too early, a microbatch late."""
    plain, last = Sender.send, {}

    def send(self, key, tensors):
        stale = last.get((self, key), tensors)
        last[self, key] = [tensor.clone() for tensor in tensors]
        return plain(self, key, stale)

    found = seen(piped(steps=1), monkeypatch, Sender, "send", send)
    assert 1e-6 < found.loss < 0.5, "no one would notice"


@pytest.mark.parametrize("schedule", ["1f1b", "chimera"])
def test_a_gradient_counted_by_every_worker_that_has_a_copy(monkeypatch, schedule):
    """In the norm: of tied ends, and of stages on two ways."""

    def counted(self, squares):
        return sum(squares.values())

    case = piped(schedule, "llama", clip=0.5)
    found = seen(case, monkeypatch, Totals, "_counted", counted)
    (mine, theirs), *_ = found.norms
    assert mine > theirs * (1 + 1e-6)
    assert all(ratio < 1 for ratio in ratios(found).values()), "clipped by more than the norm says"


def test_losses_divided_by_the_microbatches_as_well(monkeypatch):
    """A mean of what was divided by the count of all tokens already."""
    plain = NativeFlow.begin

    def begin(self, part, factor, *rest):
        return plain(self, part, factor / self.plan.microbatches, *rest)

    found = seen(piped(steps=1), monkeypatch, NativeFlow, "begin", begin)
    assert list(ratios(found).values()) == pytest.approx([0.25] * len(found.rows), abs=1e-9)


def test_gradients_of_copies_that_are_not_summed(monkeypatch):
    """Each way of a bidirectional pipeline learns from its own microbatches."""
    bug = lambda self, index, gradients: None  # noqa: E731
    found = seen(piped("chimera"), monkeypatch, ShardGroups, "merge", bug)
    assert found.gradient > 1e-2


# -- vocabularies that are cut ---------------------------------------------------------------------


@pytest.mark.parametrize("vocabulary", [1, 2])
def test_an_embedding_that_lacks_a_workers_rows(monkeypatch, vocabulary):
    """Tokens of the other worker are zeros, which a norm makes look like others."""
    plain = Rows.exchange

    def exchange(self, state, microbatch):
        going = self._under_way[microbatch].going
        if state is State.ACTIVATIONS and self._line.rank:
            going[state].zero_()
        plain(self, state, microbatch)

    found = seen(piped(steps=1, vocabulary=vocabulary), monkeypatch, Rows, "exchange", exchange)
    assert 1e-6 < found.loss < 0.5, "no one would notice"


@pytest.mark.parametrize("vocabulary", [1, 2])
def test_a_gradient_that_lacks_a_workers_rows(monkeypatch, vocabulary):
    """The head's rows learn what they should; what is before them learns from half of them."""
    plain = Rows.exchange

    def exchange(self, state, microbatch):
        if state is self.back and not self._line.rank:
            here = self._under_way[microbatch]
            gone = here.scored if state is State.SUMS else here.going[state]
            for tensor in (gone.soft_TD, gone.pull_TD) if state is State.SUMS else (gone,):
                tensor.zero_()
        plain(self, state, microbatch)

    found = seen(piped(steps=1, vocabulary=vocabulary), monkeypatch, Rows, "exchange", exchange)
    (mine, theirs), *_ = found.losses
    assert mine == pytest.approx(theirs, rel=1e-12), "which looks normal"
    bad = {row.name for row in found.rows if row.gradient > 1e-6}
    assert "prologue.tokens.weight" in bad and "epilogue.head.weight" not in bad


def test_sums_of_a_softmax_that_lack_a_workers_rows(monkeypatch):
    """Each worker's probabilities are of its own rows."""
    plain = kernels.together

    def together(vocabulary, mine_XC):
        return plain(vocabulary, mine_XC * (1 - vocabulary.others.rank) + 0.0)

    found = seen(piped(steps=1, vocabulary=1), monkeypatch, kernels, "together", together)
    assert found.gradient > 1e-3


def test_a_loss_that_every_worker_counts(monkeypatch):
    """Gradients are right; what is said is twice as much."""

    def settle(self, m):
        self._microbatches.lose(m, self.rows.settle(m))

    found = seen(piped(steps=1, vocabulary=2), monkeypatch, Vocabulary, "_settle", settle)
    (mine, theirs), *_ = found.losses
    assert mine == pytest.approx(2 * theirs, rel=1e-12)
    assert found.gradient < 1e-10


@pytest.mark.parametrize("family", ["llama", "llama, untied"])
def test_rows_of_an_embedding_that_learn_nothing_from_a_microbatch(monkeypatch, family):
    """An EMBED_BACKWARD that one worker leaves out; tied rows learn as a head all the same."""
    plain = Rows.embed_backward

    def backward(self, microbatch):
        if self._line.rank and microbatch == 1:
            self._under_way[microbatch].edge = None
        else:
            plain(self, microbatch)

    case = piped(family=family, steps=1, vocabulary=1)
    found = seen(case, monkeypatch, Rows, "embed_backward", backward)
    (mine, theirs), *_ = found.losses
    assert mine == pytest.approx(theirs, rel=1e-12)
    assert [row.name for row in found.rows if row.gradient > 1e-9] == ["prologue.tokens.weight"]


# -- the validator ---------------------------------------------------------------------------------


def list_of(schedule: str, rank: int) -> Schedule:
    """A worker's actions, of the tied model."""
    case = piped(schedule, "llama")
    job = planned.make(case, PretendWorld(LINE, rank))
    job.close()
    return job.schedule


def moved(made: Schedule, source: int, target: int) -> Schedule:
    actions = list(made.workers[0])
    actions.insert(target, actions.pop(source))
    return replace(made, workers=(tuple(actions),))


def places(made: Schedule, kind: Kind) -> list[int]:
    return [i for i, action in enumerate(made.workers[0]) if action.kind is kind]


@pytest.mark.parametrize("rank", [0, 1])
def test_stages_in_another_order_are_refused(rank):
    made = list_of("1f1b", rank)
    one, other = places(made, Kind.FORWARD)[:2]
    with pytest.raises(OutsizeError, match="was not produced"):
        prove(moved(made, other, one))


@pytest.mark.parametrize("schedule", ["1f1b", "chimera"])
def test_copies_that_are_summed_before_the_last_microbatch_are_refused(schedule):
    made = list_of(schedule, 0)
    last = max(i for i, a in enumerate(made.workers[0]) if a.kind is Kind.BACKWARD)
    stage = made.workers[0][last].stage
    merge = next(i for i in places(made, Kind.MERGE) if made.workers[0][i].stage == stage)
    assert merge > last
    with pytest.raises(OutsizeError, match="merge"):
        prove(moved(made, merge, last))


def test_an_activation_sent_before_it_is_there_is_refused():
    made = list_of("1f1b", 0)
    send = places(made, Kind.SEND)[0]
    with pytest.raises(OutsizeError, match="what it sends was not produced"):
        prove(moved(made, send, 0))


def test_a_gradient_that_is_received_and_not_used_is_refused():
    made = list_of("1f1b", 0)
    actions = [a for a in made.workers[0] if not (a.kind is Kind.BACKWARD and a.microbatch == 1)]
    with pytest.raises(OutsizeError):
        prove(replace(made, workers=(tuple(actions),)))
