"""What an earlier start has timed is believed where steps take what they took, and only there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace

import pytest
import torch

from outsize.errors import OutsizeError
from outsize.models.build import build
from outsize.models.families import parse
from outsize.serve import around
from outsize.serve import engine as engines
from outsize.serve import probed as probing
from outsize.serve.asks import Room
from outsize.serve.engine import Engine
from outsize.serve.http import listening
from outsize.serve.model import Model
from outsize.serve.policies import POLICIES
from outsize.serve.probed import priced
from outsize.simulate import kept as keeping
from outsize.simulate import tokens

MODEL = {
    "model_type": "llama", "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2,
    "num_key_value_heads": 1, "intermediate_size": 48, "vocab_size": 257,
    "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "hidden_act": "silu",
}  # fmt: skip


class Machine:
    """On which everything takes `seconds`; timed: how often that was asked."""

    seconds, timed = 1.0, 0

    def quickest(self, call: object, device: torch.device) -> float:
        self.timed += 1
        return self.seconds


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    found = Machine()
    monkeypatch.setattr(keeping, "user_cache", lambda: tmp_path)
    monkeypatch.setattr(probing, "quickest", found.quickest)
    monkeypatch.setattr(probing, "_LONG", 10.0)  # so that all blocks are timed
    return found


def test_a_second_start_looks_at_few_steps_and_believes_the_first(machine) -> None:
    model = build(parse(MODEL), 0)
    first = priced(model, 64, 128)
    whole, machine.timed, machine.seconds = machine.timed, 0, 1.2
    assert priced(model, 64, 128) == first
    assert 0 < machine.timed == 2 * len(model.blocks) < whole


def test_many_tokens_go_through_a_few_blocks(machine, monkeypatch) -> None:
    """Half of what a first start times was 256 tokens through all."""
    monkeypatch.setattr(tokens, "TIMED", 1)
    model, asked = build(parse(MODEL), 0), list[int]()
    for budget in (64, 256):
        machine.timed = 0
        probing.probed(model, range(len(model.blocks) + 2), budget, 512)
        asked.append(machine.timed)
    assert len(model.blocks) > 1 and asked[1] == asked[0] + 1


def test_what_the_host_does_is_part_of_a_step(machine, monkeypatch) -> None:
    """As the engine takes steps of one request and of many, once for a kind of number."""
    taken = list[int]()

    def quickest(call: Callable[[], object], device: torch.device) -> float:
        if not isinstance(engine := getattr(call, "__self__", None), Engine):
            return 0.0
        call()
        taken.append(len(engine.line.going))
        return 2.0 + 0.5 * taken[-1]

    monkeypatch.setattr(probing, "quickest", quickest)
    monkeypatch.setattr(around, "quickest", quickest)
    around.around.cache_clear()
    price = probing.probed(model := build(parse(MODEL), 0), range(5), 64, 128)
    assert (price.host, price.head(1), price.head(4)) == (2.0, 0.5, 2.0)
    assert price.step(9, 4, 1.0) == 5.0 and set(taken) == {1, 33}
    assert price.beside(8.0, 64, 0) == 12 and price.most(8.0, 5, 64, 0.0, 0) == 64
    probing.probed(model, range(5), 64, 128)
    assert len(taken) == 6
    around.around.cache_clear()


@pytest.mark.parametrize("seconds", [0.7, 1.6])
def test_a_machine_that_is_slower_or_quicker_now_is_timed_anew(machine, seconds) -> None:
    model = build(parse(MODEL), 0)
    first = priced(model, 64, 128)
    machine.seconds = seconds
    found = priced(model, 64, 128)
    assert found.blocks(1) == pytest.approx(seconds * first.blocks(1))
    assert priced(model, 64, 128) == found  # and that is kept


def test_weights_come_to_lie_where_steps_read_them_best(machine, monkeypatch) -> None:
    """At a first start before any step is timed, at a later one when nobody asks, each in runs."""
    model, moved = build(parse(MODEL), 0), list[tuple[int, list[tuple[int, int]]]]()
    monkeypatch.setattr(probing, "_RUN", 4096)
    monkeypatch.setattr(
        probing, "gather_huge", lambda spans: moved.append((machine.timed, list(spans)))
    )
    every = sorted((x.data_ptr(), x.nbytes) for x in model.parameters())
    priced(model, 64, 128)
    assert {timed for timed, _ in moved} == {0} and [x for _, run in moved for x in run] == every
    assert 1 < len(moved) < len(every)
    before = len(moved)
    priced(model, 64, 128)
    assert len(moved) == before
    monkeypatch.setattr(engines, "gather_huge", (gathered := SimpleQueue()).put)
    with Engine(Model(model), Room(4, 64, 2, 64, 512, 128), POLICIES.get("mixed")):
        assert [gathered.get() for _ in moved] == [run for _, run in moved]


def test_what_stands_for_weights_elsewhere_is_not_moved(machine, monkeypatch) -> None:
    """Its bytes are not there: what lies behind it in memory is somebody else's."""
    moved: list[tuple[int, int]] = []
    monkeypatch.setattr(probing, "gather_huge", moved.extend)
    model = build(parse(MODEL), 0)
    here = [x for x in model.blocks[0].parameters()]
    for block in list(model.blocks)[1:]:
        for x in block.parameters():
            x.data = x.data.new_zeros(()).expand(x.shape)
    probing.probed(model, (0, 1, len(model.blocks) + 1), 64, 128)
    others = [*model.prologue.parameters(), *model.epilogue.parameters()]
    assert set(moved) == {(x.data_ptr(), x.nbytes) for x in (*here, *others)}


def test_another_step_context_or_type_is_timed_anew(machine) -> None:
    model = build(parse(MODEL), 0)
    first = priced(model, 64, 128)
    machine.seconds = 1.1
    for asked in ((model, 16, 128), (model, 64, 32), (build(parse(MODEL), 0).double(), 64, 128)):
        assert priced(*asked).head != first.head


@pytest.mark.parametrize(
    ("others", "threads", "seconds"), [(1.0, 2, 2**-4), (1.5, 2, 2**-4 * 1.5), (40.0, 2, 2**-3)]
)
def test_a_busy_machine_is_timed_by_what_this_thread_had(
    others: float, threads: int, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call takes an eighth of a second of processor time, in equal parts by all threads, one of
    which spins where others have the processor."""
    wall, own, before = 0.0, 0.0, torch.get_num_threads()

    def call() -> None:
        nonlocal wall, own
        share = 2**-3 / torch.get_num_threads()
        wall += share * others
        own += share if others < 2 or torch.get_num_threads() == 1 else share * 8

    clocks = SimpleNamespace(perf_counter=lambda: wall, thread_time=lambda: own)
    monkeypatch.setattr(probing, "time", clocks)
    torch.set_num_threads(threads)
    try:
        assert probing.quickest(call, torch.device("cpu")) == seconds
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)


def test_what_is_not_installed_is_said_before_a_model_is_read(monkeypatch) -> None:
    known = listening.find_spec
    monkeypatch.setattr(
        listening, "find_spec", lambda name: None if name == "llguidance" else known(name)
    )
    with pytest.raises(OutsizeError, match=r"llguidance is missing; pip install 'outsize\[serve\]"):
        listening.check_installed()
