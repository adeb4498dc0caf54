"""A tiny run: what it leaves behind, and that going on gives the numbers of never stopping."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import signal
from functools import partial
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from run_files import DeathError, assert_same_run, files_of
from safetensors.torch import load_file
from tokenizers import Tokenizer

from outsize.cli.main import main
from outsize.errors import OutsizeError
from outsize.memory import OverBudget
from outsize.runtime.loss_scale import LossScale
from outsize.train.config import had_of
from outsize.train.loop import Loop
from outsize.train.metrics import read_metrics
from outsize.train.model import subject
from outsize.train.resolve import recorded_values, resolve


def test_a_run_from_start_to_end(runs) -> None:
    printed = runs.train()
    run = runs.home / "run"
    assert printed.index("predicted: ") < printed.index("step 1/8")
    for expected in ("bits per byte", "sample", "predicted  ", "peak memory", "resident memory"):
        assert expected in printed
    records = read_metrics(run)
    assert [r["step"] for r in records if "loss" in r] == list(range(1, 9))
    assert [r["step"] for r in records if "validation_bits_per_byte" in r] == [4, 8]
    assert all(r["loss"] > 0 and r["gradient_norm"] > 0 for r in records if "loss" in r)
    assert records[-1]["measured_peak_bytes"] > 0
    assert (run / "sample.txt").read_text().startswith("import ")
    assert "<html" in (run / "timeline.html").read_text()
    assert json.loads((run / "trace.json").read_text())["traceEvents"]
    assert [p.name for p in sorted(run.glob("step-*"))] == ["step-00000006", "step-00000008"]
    assert {(1, "loss"), (8, "loss"), (8, "validation_bits_per_byte")} <= told_tensorboard(run)


def told_tensorboard(run: Path) -> set[tuple[int, str]]:
    """Step and name of every number."""
    from tensorboardX.proto import event_pb2

    (path,) = run.glob("events.out.tfevents.*")
    data, tags = path.read_bytes(), set()
    while data:  # length (8), its checksum (4), event, its checksum (4)
        size = int.from_bytes(data[:8], "little")
        event = event_pb2.Event.FromString(data[12 : 12 + size])
        tags |= {(event.step, value.tag) for value in event.summary.value}
        data = data[16 + size :]
    return tags


@pytest.mark.parametrize(
    ("precision", "approximate", "dtype"),
    [
        ("float32", "[]", torch.float32),
        ("bfloat16", "[]", torch.float32),  # what training goes on from: the master copy
        ("bfloat16", "[bfloat16-weights]", torch.bfloat16),
    ],
)
def test_the_checkpoint_is_a_hugging_face_directory(runs, precision, approximate, dtype) -> None:
    transformers = pytest.importorskip("transformers")
    runs.train(train__steps=3, precision=precision, plan__approximate=approximate)
    last = runs.home / "run" / "step-00000003"
    tensors = load_file(last / "model.safetensors")
    assert {x.dtype for x in tensors.values()} == {dtype}
    said = json.loads((last / "config.json").read_text())
    assert {said[k] for k in ("dtype", "torch_dtype") if k in said} == {str(dtype)[6:]}
    assert ("lm_head.weight" in tensors) != said["tie_word_embeddings"]
    theirs = transformers.AutoModelForCausalLM.from_pretrained(last)
    assert theirs.dtype == dtype and theirs.config.eos_token_id == 256
    tokenizer = transformers.AutoTokenizer.from_pretrained(last)
    from outsize.checkpoint import hub

    ids = tokenizer("def walk(é):\n").input_ids
    assert ids == [256, *"def walk(é):\n".encode()], "as documents begin in training"
    with torch.no_grad():
        ours = hub.load(last, torch.float32)(torch.tensor([ids]))
        assert torch.allclose(ours, theirs.float()(torch.tensor([ids])).logits, atol=1e-5)


def test_a_run_of_epochs_reads_every_row_so_often(runs) -> None:
    own = {"train__evaluate_every": 0, "train__save_every": 0, "data__validation": 0}
    (runs.home / "one.txt").write_text((runs.home / "text" / "0.txt").read_text())
    own |= {"data__path": runs.home / "one.txt"}
    printed = runs.train(train__epochs="2", train__steps="null", **own)
    run = runs.home / "run"
    found = recorded_values(run)
    every = int(re.search(r"data: .*?([\d,]+) tokens;", printed)[1].replace(",", "")) // 64
    steps = -(-2 * every // 4)
    assert found.get("train.steps") == steps and found.get("train.epochs.count") == 2
    assert [r["step"] for r in read_metrics(run) if "loss" in r][-1] == steps
    with pytest.raises(OutsizeError, match=r"train.steps and train.epochs are given together"):
        runs.train(train__epochs="2", output=runs.home / "other")


def test_a_run_goes_on_for_more_epochs_by_the_rows_that_are_left(runs) -> None:
    own = {"train__evaluate_every": 0, "train__save_every": 0, "sample__tokens": 0}
    (runs.home / "one.txt").write_text((runs.home / "text" / "0.txt").read_text())
    own |= {"data__path": runs.home / "one.txt", "data__validation": 0}
    printed = runs.train(train__epochs="0.5", train__steps="null", **own)
    run = runs.home / "run"
    every = int(re.search(r"data: .*?([\d,]+) tokens;", printed)[1].replace(",", "")) // 64
    first = math.ceil(math.ceil(every / 2) / 4)
    runs.resume(run, "train.epochs=1", "train.batch_tokens=128")
    left = every - 4 * first  # rows; a step now has two
    assert [r["step"] for r in read_metrics(run) if "loss" in r][-1] == first + math.ceil(left / 2)
    assert "is finished" in runs.resume(run, "train.epochs=0.5")
    with pytest.raises(OutsizeError, match=r"train.steps and train.epochs are given together"):
        runs.resume(run, "train.epochs=2", "train.steps=999")
    runs.resume(run, f"train.steps={first + math.ceil(left / 2) + 1}")
    assert "train.epochs" not in recorded_values(run).config.techniques


def test_a_run_is_a_model_to_train_on(runs) -> None:
    runs.train(train__steps=1)
    latest = runs.home / "run" / "step-00000001"
    found, model = subject(resolve(None, [f"model={runs.home / 'run'}"]))
    assert found.get("model.name") == str(latest) == str(model.directory)
    assert found.origins["model.name"] == f"derived: the latest of {runs.home / 'run'}"
    shutil.rmtree(latest)
    with pytest.raises(OutsizeError, match=r"no checkpoint in .*run; expected step-"):
        subject(resolve(None, [f"model={runs.home / 'run'}"]))
    with pytest.raises(OutsizeError, match=r"has no config\.json; expected the directory of a"):
        subject(resolve(None, [f"model={runs.home}"]))


def test_a_finished_run_says_so_and_can_go_on_for_longer(runs) -> None:
    runs.train(schedule__shape="constant", schedule__warmup=0)
    runs.train(
        schedule__shape="constant", schedule__warmup=0, train__steps=4, output=runs.home / "short"
    )
    assert "is finished: step 4 of 4" in runs.resume(runs.home / "short")
    assert "going on from step 4 of 8" in runs.resume(runs.home / "short", "train.steps=8")
    assert files_of(runs.home / "short") == files_of(runs.home / "run")


@pytest.mark.parametrize(
    "keys",
    [
        {"precision": "float16", "train__batch_tokens": 64},
        {"precision": "bfloat16", "optimizer__name": "muon", "train__dropout": 0.2},
    ],
    ids=["float16", "bfloat16-muon-dropout"],
)
def test_going_on_from_a_checkpoint_is_bitwise(runs, keys, monkeypatch) -> None:
    first = partial(LossScale, 2.0**18)  # overflows before the checkpoint, and behind it no more
    monkeypatch.setattr("outsize.runtime.handlers.training.LossScale", first)
    runs.train(**keys, train__keep="null")
    whole = runs.home / "run"
    cut = runs.home / "cut"
    step = Loop._step

    def dying(loop, batch, show):
        if loop.place.step == 5:
            raise DeathError
        step(loop, batch, show)

    with monkeypatch.context() as patch, pytest.raises(DeathError):
        patch.setattr(Loop, "_step", dying)
        runs.train(**keys, train__keep="null", output=cut)
    assert [r["step"] for r in read_metrics(cut) if "loss" in r] == [1, 2, 3, 4, 5]
    assert "going on from step 3 of 8" in runs.resume(cut)
    assert_same_run(whole, cut)
    if keys["precision"] == "float16":
        said = [r for r in read_metrics(cut) if "loss_scale" in r]
        skipped = said[-1]["skipped_steps"]
        assert 0 < skipped < 8 and said[-1]["loss_scale"] == 2.0 ** (18 - skipped)
        assert sum("gradient_norm" not in r for r in said) == skipped
    for name in ("model", "optimizer"):
        one, other = (load_file(d / f"step-00000008/{name}.safetensors") for d in (whole, cut))
        assert one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)


@pytest.mark.slow
def test_a_stopped_process_goes_on_bitwise(runs) -> None:
    """SIGINT, with workers: tests/cli/test_workers.py."""
    steps = {"train__steps": 14, "train__save_every": 7, "train__evaluate_every": 0}
    whole = runs.home / "whole"
    runs.train(**steps, output=whole)
    for number, code in ((signal.SIGTERM, 143), (signal.SIGKILL, -9)):
        cut = runs.home / f"cut by {number:d}"
        words = [w for s in runs.sets(**steps, output=cut) for w in ("--set", s)]
        process = runs.command("train", *words, hold=11)
        runs.wait_for_hold()
        os.kill(process, number)
        (runs.home / "go").touch()
        found, printed = runs.ended(process)
        assert found == code, printed
        if number != signal.SIGKILL:
            assert f"outsize train --resume '{cut}'" in printed
            assert "and saved" in printed
        (runs.home / "go").unlink()
        assert f"going on from step {7 if number == signal.SIGKILL else 11}" in runs.resume(cut)
        assert_same_run(whole, cut)


def test_another_run_of_the_same_directory_is_refused_meanwhile(runs) -> None:
    from outsize.checkpoint.store import Store

    with Store(runs.home / "run"), pytest.raises(OutsizeError, match="in use by process"):
        runs.train()


def test_going_on_with_other_numbers_or_data_is_refused(runs, monkeypatch) -> None:
    """Beside a second start in the same directory, before its data are read; other data are taken
    where they are said, other threads are said."""
    runs.train(train__steps=2)
    run, text = runs.home / "run", runs.home / "text" / "0.txt"
    with monkeypatch.context() as patch:
        patch.setattr("outsize.train.run.ready_of", lambda *_: pytest.fail("it reads its data"))
        with pytest.raises(OutsizeError, match=r"holds a run already \(step 2\).*--resume"):
            runs.train(train__steps=2)
    for change, complaint in (
        ("model.name=small", "model.name is 'small'"),
        ("train.sequence=32", "train.sequence is 32"),
        ("train.seed=5", "train.seed is 5"),
        ("precision=bfloat16", "precision is 'bfloat16'"),
        ("weights=int4", "weights.format is 'int4' .* was started without weights"),
        ("adapt.dora.rank=16", "adapt.dora.rank is 16 .* was started without adapt.dora"),
    ):
        with pytest.raises(OutsizeError, match=complaint):
            runs.resume(run, "train.steps=4", change)
    for path, old, new, complaint in (
        (run / "run.yaml", "seed: 0", "seed: 1", r"train.seed is 1, but the checkpoint .* with 0"),
        (text, "os", "so", "bring back the data"),
    ):
        kept = path.read_text()
        path.write_text(kept.replace(old, new).replace("steps: 2", "steps: 4"))
        with pytest.raises(OutsizeError, match=complaint):
            runs.resume(run, *(() if path != text else ("train.steps=4",)))
        path.write_text(kept)
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)  # two would wait and spin
    assert "threads: 2, where the run had 1" in runs.resume(run, "train.steps=3", "threads=2")
    (other := runs.home / "other").mkdir()
    (other / "0.txt").write_text("something else\n" * 500)
    printed = runs.resume(run, "train.steps=4", f"data.path={other}")
    assert "from here on data.path is" in printed and "going on from step 3 of 4" in printed
    (other / "0.txt").write_text("changed in silence\n" * 500)
    with pytest.raises(OutsizeError, match="bring back the data"):
        runs.resume(run, "train.steps=6")


def test_what_a_run_had_by_key() -> None:
    beside = {"adapt.lora.rank": 16, "optimizer.name": "sgd"}
    assert had_of(beside, "adapt.lora") is True and had_of(beside, "adapt.lora.rank") == 16
    assert had_of(beside, "adapt.dora") is False and had_of(beside, "sgd.momentum") == 0.9


def test_a_run_goes_on_with_another_rate_and_batch_and_says_so(runs) -> None:
    runs.train(train__steps=4, optimizer__lr=0.01)
    run, cut = runs.home / "run", runs.home / "cut"
    changes = ("train.steps=8", "optimizer.lr=0.001", "train.batch_tokens=192")
    printed = runs.resume(run, *changes, "train.save_every=3")
    assert "from here on optimizer.lr is 0.001, where the run had 0.01" in printed
    assert "from here on train.batch_tokens is 192, where the run had 256" in printed
    made = [record for record in read_metrics(run) if "lr" in record]
    assert [record["tokens"] for record in made] == [256, 512, 768, 1024, 1216, 1408, 1600, 1792]
    assert max(record["lr"] for record in made[4:]) <= 0.001 < made[2]["lr"]
    shutil.copytree(run, cut)  # and once more in the middle, with nothing said
    shutil.rmtree(cut / "step-00000008")
    (cut / "latest").write_text((cut / "latest").read_text().replace("8", "6"))
    again = runs.resume(cut)
    assert "going on from step 6 of 8" in again and "from here on" not in again
    assert files_of(cut) == files_of(run)


def test_a_checkpoint_of_another_model_is_refused(runs) -> None:
    runs.train(train__steps=2)
    runs.train(train__steps=2, output=runs.home / "other", model__vocabulary=272)
    last = runs.home / "run" / "step-00000002"
    last.rename(runs.home / "gone")
    (runs.home / "other" / "step-00000002").rename(last)
    with pytest.raises(OutsizeError, match=r"model.vocabulary is 264, .* trained with 272"):
        runs.resume(runs.home / "run", "train.steps=4")


def test_a_damaged_checkpoint_is_refused_and_the_one_before_taken_when_asked(runs) -> None:
    runs.train(train__steps=6)
    run = runs.home / "run"
    path = run / "step-00000006" / "optimizer.safetensors"
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)
    with pytest.raises(
        OutsizeError, match=r"tensor '.*' is damaged.*--on-damage previous goes on from step 3"
    ):
        runs.resume(run, "train.steps=8")
    printed = runs.resume(run, "train.steps=8", on_damage="previous")
    assert "passed over:" in printed and "going on from step 3 of 8" in printed


def test_a_budget_that_is_exceeded_leaves_the_checkpoint(runs, monkeypatch) -> None:
    step = Loop._step

    def greedy(loop, batch, show):
        if loop.place.step == 4:
            loop.measure.ledger.budget = loop.measure.ledger.total + 100
        step(loop, batch, show)

    with monkeypatch.context() as patch:
        patch.setattr(Loop, "_step", greedy)
        with pytest.raises(OutsizeError, match=r"missing; step 3 is saved: outsize") as error:
            runs.train(memory="1GiB")
    assert isinstance(error.value.__cause__, OverBudget)
    assert "going on from step 3 of 8" in runs.resume(runs.home / "run")


def test_too_small_a_budget_is_refused_before_anything_is_made(runs) -> None:
    with pytest.raises(OutsizeError, match=r"\d+ bytes missing; the smallest plan needs"):
        runs.train(memory="1MiB")
    assert not (runs.home / "run").exists()


def test_stored_weights_are_trained_on(runs) -> None:
    runs.train(train__steps=4)
    before = runs.home / "run" / "step-00000004"
    printed = runs.train(model__name=before, output=runs.home / "tuned", train__steps=2)
    assert "step 2/2" in printed
    first = read_metrics(runs.home / "run")[0]["loss"]
    assert read_metrics(runs.home / "tuned")[0]["loss"] < first - 0.5
    (before / "model.safetensors").unlink()
    with pytest.raises(OutsizeError, match=r"set model.weights=random"):
        runs.train(model__name=before, output=runs.home / "again", train__steps=2)
    runs.train(
        model__name=before, output=runs.home / "again", train__steps=2, model__weights="random"
    )


def test_a_run_whose_steps_are_gone_is_not_begun_anew(runs) -> None:
    """With and without the pointer to them; a run that had saved nothing yet begins anew, says so,
    and gives the same."""
    run = runs.home / "run"
    runs.train()
    shutil.copytree(run, runs.home / "whole")
    for step in run.glob("step-*"):
        shutil.rmtree(step)
    kept = (run / "metrics.jsonl").read_text()
    with pytest.raises(OutsizeError, match="made 8 steps, and none of its checkpoints is there"):
        runs.resume(run)
    (run / "latest").unlink()
    with pytest.raises(OutsizeError, match="put one of its step-"):
        runs.resume(run)
    assert (run / "metrics.jsonl").read_text() == kept
    lines = kept.splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(lines[:2]))  # killed before step 3 was saved
    assert "no step of the run in" in runs.resume(run)
    assert_same_run(runs.home / "whole", run)


@pytest.mark.parametrize(("said", "steps"), [(None, 20), (3, 4)])
def test_a_derived_warm_up_goes_with_the_steps(runs, said, steps) -> None:
    """Of a run that goes on with more of them; what somebody said stays."""
    own = {"train__evaluate_every": 0, "train__sequence": 16, "train__batch_tokens": 16}
    own |= {} if said is None else {"learning_rate__warmup": said}
    runs.train(train__steps=steps, train__save_every=0, **own)
    run = runs.home / "run"
    assert warmup_of_run(run) == (1 if said is None else said)
    printed = runs.resume(run, f"train.steps={2 * steps}", "train.save_every=0")
    assert f"going on from step {steps} of {2 * steps}" in printed
    assert warmup_of_run(run) == (2 if said is None else said)


def warmup_of_run(run: Path) -> int:
    return recorded_values(run).get("learning_rate.warmup")


def test_a_tokenizer_is_trained_on_the_data_once(runs, monkeypatch) -> None:
    own = {"data__tokenizer": "bpe:300", "data__cache": runs.home / "cache", "train__steps": 2}
    runs.train(**own)
    run = runs.home / "run"
    said = json.loads((run / "step-00000002" / "config.json").read_text())
    assert said["vocab_size"] == 320  # rounded up to 64s
    inner = Tokenizer.from_file(str(run / "step-00000002" / "tokenizer.json"))
    text = (runs.home / "text" / "0.txt").read_text()
    ids = inner.encode(text).ids
    assert inner.get_vocab_size() <= 300 and inner.decode(ids) == text and 2 * len(ids) < len(text)
    monkeypatch.setattr("outsize.data.vocabulary.make", lambda *_: pytest.fail("trained again"))
    runs.train(**own, output=runs.home / "again")
    assert files_of(runs.home / "again") == files_of(run)
    assert "going on from step 2 of 3" in runs.resume(run, "train.steps=3")
    with pytest.raises(OutsizeError, match="expected bpe:IDS, as bpe:2048"):
        runs.train(**{**own, "data__tokenizer": "bpe:many"}, output=runs.home / "other")


def test_the_first_run_is_a_recipe_of_its_own(monkeypatch) -> None:
    told = []
    monkeypatch.setattr("outsize.train.run.explain", lambda said, _: told.append(said))
    for words in ([], ["--set", "train.seed=1"]):
        assert CliRunner().invoke(main, ["train", *words, "--explain"]).exit_code == 0
    first, other = told
    assert first.config.optimizer.name == "muon" and first.config.data.tokenizer == "bpe:2048"
    assert other.config.optimizer.name == "adamw" and other.config.data.tokenizer is None
