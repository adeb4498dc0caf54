"""What a rehearsal has found is found again by the next start, and never believed wrongly."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

import outsize
from outsize.collectives import Mesh
from outsize.decode.generate import Request
from outsize.decode.samplers import Sampling
from outsize.hardware import catalogue
from outsize.kernels import building, native, product
from outsize.models.build import build
from outsize.models.families import parse
from outsize.optim import AdamW
from outsize.plan import Plan, Precision
from outsize.plan.plan import per_segment
from outsize.registry import Registry
from outsize.search import PlanRequest, choose, predict
from outsize.search import request as requests
from outsize.search.request import Forecaster
from outsize.simulate import kept as keeping
from outsize.simulate.kept import kept
from outsize.simulate.rehearse import rehearse
from outsize.simulate.tokens import Held, Needs, needs, resident
from outsize.techniques.optim import frugal

MODEL = {
    "model_type": "llama", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "intermediate_size": 48, "vocab_size": 257,
    "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "hidden_act": "silu",
}  # fmt: skip
FOUND = Needs(1, 2, 3)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(keeping, "user_cache", lambda: tmp_path)
    return tmp_path / "rehearsed"


@pytest.fixture
def held() -> Held:
    return resident(build(parse(MODEL), 0))


def never() -> Needs:
    raise AssertionError("found anew")


def test_what_was_found_is_there_for_an_equal_key(folder, held) -> None:
    assert kept(Needs, held, lambda: FOUND) == FOUND
    assert kept(Needs, resident(build(parse(MODEL), 1)), never) == FOUND
    assert len(list(folder.iterdir())) == 1


CHANGES: tuple[Callable[[Held], Held], ...] = (
    lambda held: replace(held, dtypes={name: torch.bfloat16 for name in held.dtypes}),
    lambda held: replace(held, config=replace(held.config, heads=4)),
    lambda held: replace(held, here=(True, False, True)),
    lambda held: replace(held, stored=torch.float32),
    lambda held: replace(held, config=replace(held.config, frozen=frozenset({"a"}))),
)


@pytest.mark.parametrize("changed", CHANGES)
def test_another_model_format_or_worker_is_found_anew(folder, held, changed) -> None:
    kept(Needs, held, lambda: FOUND)
    with pytest.raises(AssertionError, match="found anew"):
        kept(Needs, changed(held), never)


@pytest.mark.parametrize(
    ("where", "name", "value"),
    [
        (torch, "__version__", "0"),
        (native, "library", lambda: None),
        (keeping, "_source", lambda: "another"),
        (torch, "get_num_threads", lambda: 77),
    ],
)
def test_another_pytorch_kernel_source_or_thread_is_found_anew(
    folder, held, monkeypatch, where, name, value
) -> None:
    kept(Needs, held, lambda: FOUND)
    monkeypatch.setattr(where, name, value)
    with pytest.raises(AssertionError, match="found anew"):
        kept(Needs, held, never)


def test_a_damaged_file_and_one_of_foreign_classes_are_found_anew(folder, held) -> None:
    kept(Needs, held, lambda: FOUND)
    (path,) = folder.iterdir()
    content = path.read_bytes()
    for damage in (b"", content[:-1], b"?" + content[1:]):
        path.write_bytes(damage)
        assert kept(Needs, held, lambda: replace(FOUND, work=9)).work == 9
        assert kept(Needs, held, never).work == 9
    foreign = (
        3, ["made", "pathlib.Path", "x"], ["made", "outsize.simulate.kept.Path", "x"], [], ["enum"],
        ["made", "subprocess.Popen", "true"], ["made", "outsize.simulate.tokens.Needs", 1],
        ["made", "outsize.decode.samplers.Sampling", 1.0, 1, 1.0, 0.0, 0], ["dtype", "load"],
    )  # fmt: skip
    for other in foreign:
        building.keep(json.dumps(other).encode(), path)
        assert kept(Needs, held, lambda: FOUND) == FOUND


@dataclass(frozen=True)
class _Theirs:
    size: int


def test_what_has_no_text_is_not_kept(folder, held) -> None:
    def sampler(logits_V: Tensor, index: int) -> int:
        return 0

    ours = frugal._MAKES["svd"]  # of which the source does not say which one it is
    for key in (_Theirs(1), sampler, ours, object(), (held, [_Theirs(2)])):
        assert kept(Needs, key, lambda: FOUND) == FOUND
    assert not folder.exists()


def test_a_technique_from_elsewhere_keeps_nothing(folder, held, monkeypatch) -> None:
    monkeypatch.setattr(Registry, "strangers", set())
    Registry[object]("thing").add("theirs", never)
    assert Registry.strangers == {__name__}
    assert kept(Needs, held, lambda: FOUND) == FOUND and not folder.exists()


def test_a_folder_that_cannot_be_written_is_no_error(folder, held) -> None:
    folder.write_text("in the way")
    assert kept(Needs, held, lambda: FOUND) == FOUND


def test_old_files_go(folder, held, monkeypatch) -> None:
    monkeypatch.setattr(keeping, "_MOST", 4)
    for number in range(9):
        kept(Needs, number, lambda: FOUND)
    assert len(list(folder.iterdir())) <= 4


def test_costs_and_facts_of_a_plan_come_back_equal(folder, monkeypatch) -> None:
    monkeypatch.setattr(requests, "kept", kept)
    config = parse({**MODEL, "num_hidden_layers": 2})
    request = PlanRequest(2, 16, Precision.named("float32"), AdamW(), documents=(0, 16))

    def found() -> object:
        facts = requests.facts_of_model(config, request)
        plan = Plan(4, per_segment(4), 2, 1, 16)
        return facts, Forecaster(config, request, catalogue("A100-SXM-80"), facts).costs(plan)

    first = found()
    assert len(list(folder.iterdir())) == 2
    for name in ("rehearse", "_facts"):
        monkeypatch.setattr(requests, name, lambda *_: pytest.fail("rehearsed again"))
    assert found() == first


def test_a_plan_that_was_chosen_is_predicted_by_what_was_rehearsed(folder, monkeypatch) -> None:
    """As the workers do it whom the first one tells the plan: the request leaves it open."""
    monkeypatch.setattr(requests, "kept", kept)
    config = parse({**MODEL, "num_hidden_layers": 2, "num_key_value_heads": 2})
    request = PlanRequest(
        4, 16, Precision.named("float32"), AdamW(), documents=(0, 16), mesh=Mesh(2, 2),
        sequence_parallel=None,
    )  # fmt: skip
    made = choose(config, request, catalogue("A100-SXM-80"))
    for name in ("rehearse", "_facts"):
        monkeypatch.setattr(requests, name, lambda *_: pytest.fail("rehearsed again"))
    again = predict(config, request, made.plan, catalogue("A100-SXM-80"))
    assert (again.peak, again.static, again.seconds) == (made.peak, made.static, made.seconds)


def test_the_second_start_rehearses_nothing(tmp_path) -> None:
    """It imports neither fake tensors nor what they bring along, and says the same."""
    outsize.save(build(parse(MODEL), 0), tmp_path / "model")
    code = f"""
import sys
from outsize.torch_later import put_off
put_off()
import outsize
from outsize.decode.generate import Request
from outsize.decode.samplers import Sampling
from outsize.simulate.tokens import needs, resident
held = resident(outsize.load({str(tmp_path / "model")!r}))
print(needs(held, Request((0,) * 9, 3, Sampling()), 4))
names = ("sympy", "torch._decomp", "outsize.simulate.fake")
print([name for name in names if name in sys.modules])
"""
    first, second = (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        for _ in range(2)
    )
    own = needs(resident(outsize.load(tmp_path / "model")), Request((0,) * 9, 3, Sampling()), 4)
    told, absent = second.stdout.splitlines()
    assert told == first.stdout.splitlines()[0] == str(own)
    assert "fake" in first.stdout.splitlines()[1] and absent == "[]"


def test_a_processor_without_products_of_bfloat16_says_nothing_of_other_devices(
    folder, monkeypatch
) -> None:
    """Where it makes them in float32, it alone is foretold so; each has its own file."""
    monkeypatch.setattr(requests, "kept", kept)
    monkeypatch.setattr(requests, "rehearse", rehearse)
    for name, value in (("_imitated", lambda: True), ("LEAST", 1), ("FEW", 1)):
        monkeypatch.setattr(product, name, value)
    config = parse({**MODEL, "num_hidden_layers": 2})
    request = PlanRequest(2, 16, Precision.named("bfloat16"), AdamW(), documents=(0, 16))
    other = catalogue("A100-SXM-80")
    own = replace(other, devices=(replace(other.devices[0], kind="cpu"),))
    found = []
    for hardware in (own, other):
        facts = requests.facts_of_model(config, request)
        made = Forecaster(config, request, hardware, facts).costs(Plan(
            4, per_segment(4), 2, 1, 16, request.precision
        ))  # fmt: skip
        works = [cost.work for cost in made[0].actions.values()]
        found.append({dtype for work in works for *_, dtype in work.products})
    assert found == [{"float32"}, {"bfloat16"}]
