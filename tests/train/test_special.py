"""Runs whose plan changes the maths: what they predict, leave behind, and go on with, bitwise."""

from __future__ import annotations

import json
import re
from types import SimpleNamespace

import pytest
import torch
import yaml
from run_files import DeathError, assert_same_run
from safetensors.torch import load_file

from outsize.checkpoint.store import Store
from outsize.errors import OutsizeError
from outsize.train.loop import Loop
from outsize.train.metrics import read_metrics
from outsize.train.resolve import recorded_values, resolve
from outsize.train.setup import set_up
from outsize.train.state import same_run

WAYS = {
    "zeroth-order": {"optimizer__lr": "1e-3", "zeroth-order__epsilon": "1e-3"},
    "frozen-by-dynamics": {
        "frozen-by-dynamics__share": "0.6",
        "frozen-by-dynamics__keep": "int8",
    },
    "local-learning": {"optimizer__lr": "1e-2"},
}


def sets_of(name, **more):
    return {"plan__approximate": f"[{name}]", "train__keep": "null", **WAYS[name], **more}


def losses_of(run):
    return [r["loss"] for r in read_metrics(run) if "loss" in r]


def died_at(runs, monkeypatch, step, **sets):
    plain = Loop._step

    def dying(loop, batch, show):
        if loop.place.step == step:
            raise DeathError
        plain(loop, batch, show)

    with monkeypatch.context() as patch, pytest.raises(DeathError):
        patch.setattr(Loop, "_step", dying)
        runs.train(**sets)


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        ("zeroth-order", "float32"),
        ("frozen-by-dynamics", "float32"),
        ("local-learning", "bfloat16"),
    ],
)
def test_a_run_and_going_on_with_it_bitwise(runs, name, precision, monkeypatch) -> None:
    said = sets_of(name, precision=precision, train__steps=6)
    printed = runs.train(**said)
    whole, cut = runs.home / "run", runs.home / "cut"
    for expected in ("predicted: ", name, "step 6/6", "bits per byte", "sample"):
        assert expected in printed
    assert (whole / "sample.txt").read_text().startswith("import ")
    died_at(runs, monkeypatch, 5, **said, output=cut)
    assert "going on from step 3 of 6" in runs.resume(cut)
    assert_same_run(whole, cut)
    assert len(set(losses_of(whole))) == 6
    for file in ("model", "optimizer"):
        paths = [d / f"step-00000006/{file}.safetensors" for d in (whole, cut)]
        if file == "optimizer" and name == "zeroth-order":
            assert not any(p.exists() and load_file(p) for p in paths), "it has no state"
            continue
        one, other = map(load_file, paths)
        assert one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)


@pytest.mark.parametrize("name", ["local-learning", "zeroth-order"])
def test_the_predicted_peaks_of_steps_and_evaluations_are_measured(runs, name, monkeypatch) -> None:
    plain, found = Loop._evaluate, []

    def looking(loop, show):
        loop.job.ledger = loop.measure.ledger
        plain(loop, show)
        found.append((max(ran.peak for ran in loop.job.evaluated), loop.setup.forecast.evaluation))

    monkeypatch.setattr(Loop, "_evaluate", looking)
    runs.train(**sets_of(name, train__steps=2, memory="64MiB"))
    assert found
    for measured, predicted in found:
        assert 0.95 * predicted <= measured <= predicted
    last = read_metrics(runs.home / "run")[-1]
    measured, predicted = last["measured_peak_bytes"], last["predicted_peak_bytes"]
    assert 0.97 * predicted <= measured <= predicted  # a step's batch is in it


def test_the_checkpoint_of_local_learning_has_the_auxiliary_networks(runs) -> None:
    runs.train(**sets_of("local-learning", train__steps=2))
    last = runs.home / "run" / "step-00000002"
    states = load_file(last / "optimizer.safetensors")
    mean = states["auxiliary.0.average.mlp.up.weight.value"]
    block = load_file(last / "model.safetensors")["model.layers.1.mlp.up_proj.weight"]
    assert mean.shape == block.shape and not torch.equal(mean, block)
    assert not any("auxiliary" in name for name in load_file(last / "model.safetensors"))
    transformers = pytest.importorskip("transformers")
    transformers.AutoModelForCausalLM.from_pretrained(last)


def test_a_freezing_run_freezes_other_layers_after_going_on(runs) -> None:
    runs.train(**sets_of("frozen-by-dynamics", train__steps=3))
    whole = losses_of(runs.home / "run")
    runs.train(train__steps=3, output=runs.home / "plain")
    assert whole[0] == losses_of(runs.home / "plain")[0]
    assert whole[2] != losses_of(runs.home / "plain")[2]
    text = next((runs.home / "run" / "step-00000003").glob("*.json"))
    notes = [json.loads(p.read_text()) for p in text.parent.glob("*.json")]
    assert any("freezing" in json.dumps(note) for note in notes)


def test_the_weights_that_freezing_copies_are_counted_and_predicted(runs) -> None:
    """A budget of what is predicted is enough; with no layer frozen it is met to the byte, and is
    that of a plain run with the weights once more."""
    runs.train(train__steps=2, output=runs.home / "plain")
    plain = read_metrics(runs.home / "plain")[-1]["predicted_peak_bytes"]
    weights = load_file(runs.home / "plain" / "step-00000002" / "model.safetensors")
    peaks = {}
    for share in ("0", "0.6"):
        sets = sets_of("frozen-by-dynamics", train__steps=2)
        sets |= {"frozen-by-dynamics__share": share, "frozen-by-dynamics__keep": "whole"}
        runs.train(**sets, output=runs.home / f"free {share}")
        free = read_metrics(runs.home / f"free {share}")[-1]
        budget = free["predicted_peak_bytes"]
        runs.train(**sets, output=runs.home / f"bound {share}", memory=budget)
        bound = read_metrics(runs.home / f"bound {share}")[-1]
        assert bound["predicted_peak_bytes"] == budget
        assert bound["measured_peak_bytes"] <= budget
        peaks[share] = budget, bound["measured_peak_bytes"]
    assert peaks["0"] == (plain + sum(x.nbytes for x in weights.values()),) * 2
    assert peaks["0.6"][1] > 0.9 * peaks["0.6"][0]


def test_zeroth_order_weights_rest_on_a_disk_where_memory_is_small(runs, tmp_path) -> None:
    sets = sets_of("zeroth-order", train__steps=2, train__sequence=16,
                   train__batch_tokens=32, train__evaluate_every=0, sample__tokens=3,
                   plan__microbatch_rows=2, plan__loss_chunk=0, plan__mlp_tile=0)  # fmt: skip
    runs.train(**sets)
    small = {"output": runs.home / "small", "disk": f"{tmp_path}:64MiB"}
    with pytest.raises(OutsizeError, match="the smallest plan needs") as refused:
        runs.train(**sets | small, memory="1KiB")
    least = int(re.findall(r"\((\d+) bytes", str(refused.value))[-1])
    printed = runs.train(**sets | small, memory=least)
    assert "disk" in printed
    streamed, resident = (losses_of(runs.home / name) for name in ("small", "run"))
    assert streamed == resident
    records = [r for r in read_metrics(runs.home / "small") if "loss" in r]
    assert sum(v for r in records for k, v in r.items() if "disk" in k) > 0
    last = read_metrics(runs.home / "small")[-1]
    assert last["measured_peak_bytes"] <= least


def test_what_cannot_be_is_refused() -> None:
    for name, more, what in (
        ("frozen-by-dynamics", "frozen-by-dynamics.share=1", "share is 1; expected"),
        ("local-learning", "local-learning.groups=3", "groups is 3, but the model has 2 blocks"),
        ("zeroth-order", "plan.recompute=[block]", "the plan has recompute"),
    ):
        approximate = name if name.startswith("[") else f"[{name}]"
        sets = (f"plan.approximate={approximate}", "model=tiny", "precision=float32", more)
        with pytest.raises(OutsizeError, match=what):
            set_up(resolve(None, sets))


def test_settings_are_under_the_technique_s_own_name() -> None:
    with pytest.raises(OutsizeError, match=r"plan.epsilon'?.*it is zeroth-order.epsilon now"):
        resolve(None, ("plan.epsilon=1e-3",))
    with pytest.raises(OutsizeError, match="name local-learning there, or leave its settings out"):
        set_up(resolve(None, ("model=tiny", "precision=float32", "local-learning.groups=2")))
    sets = ("plan.approximate=[local-learning]", "local-learning.auxiliary=head", "optimizer.lr=1")
    local = set_up(resolve(None, (*sets, "model=tiny", "precision=float32"))).plan.local
    assert (local.groups, local.auxiliary, local.momentum) == (2, "head", 0.995)


def test_a_run_from_before_techniques_had_sections_goes_on(runs) -> None:
    """Its file and its checkpoint name every key as they did then."""
    way = sets_of("zeroth-order", train__steps=2, **{"zeroth-order__epsilon": "2e-3"})
    runs.train(**way)
    run = runs.home / "run"
    values = yaml.safe_load((run / "run.yaml").read_text())
    old = {"frozen": 0.5, "frozen_keep": "whole", "local_groups": 2}
    old["epsilon"] = values.pop("zeroth-order")["epsilon"]
    values["plan"] |= old
    (run / "run.yaml").write_text(yaml.safe_dump(values))
    said = recorded_values(run)
    assert said.get("zeroth-order.epsilon") == 2e-3 and "local-learning" not in said.to_yaml()
    with Store(run) as store:
        meta = store.load().meta
    config = {n: v for n, v in meta["config"].items() if n != "zeroth-order.epsilon"}
    config |= {f"plan.{name}": value for name, value in old.items()}
    checkpoint = SimpleNamespace(meta={**meta, "config": config}, path=run)
    same_run(checkpoint, said)
    with pytest.raises(OutsizeError, match=r"zeroth-order.epsilon is 0.001, but the checkpoint"):
        same_run(checkpoint, said.with_value("zeroth-order.epsilon", 1e-3, "here"))
    assert "going on from step 2 of 3" in runs.resume(run, "train.steps=3")
