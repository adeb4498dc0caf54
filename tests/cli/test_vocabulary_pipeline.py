"""`outsize train` on pipelines whose vocabulary is cut, and on other meshes that go on with it: the
numbers of one worker, what is predicted, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from outsize.plan import from_yaml
from outsize.trace import alone, read
from outsize.train.metrics import read_metrics

EXACT = ("--set", "precision=float64", "--set", "train.save_every=0")
TRACES = ("predicted", "measured")
FLAT = ("--set", "learning_rate.shape=constant", "--set", "train.evaluate_every=1")


def numbers(run: Path) -> dict[tuple[int, str], float]:
    names = ("loss", "gradient_norm", "tokens", "validation_loss", "lr")
    return {(r["step"], n): r[n] for r in read_metrics(run) for n in names if n in r}


def test_numbers_are_those_of_one_worker_whoever_goes_on(home, invoke):
    def train(steps: int, *words: object) -> None:
        result = invoke("train", *words, "--set", f"train.steps={steps}")
        assert result.exit_code == 0, result.stderr

    train(5, "run.yaml", *EXACT, *FLAT, "--set", "output=one")

    first = ("--mesh", "pipeline=2", "--set", "plan.pipeline=1f1b+vocabulary:1")
    train(2, "run.yaml", *EXACT, *FLAT, *first, "--set", "output=many")
    predicted, measured = (read(home / "many" / f"{name}.json") for name in TRACES)
    assert alone(predicted, measured) == ([], [])
    exchanged = [e for e in measured.events if e.kind.startswith("EXCHANGE")]
    assert len(exchanged) == 2 * 3 * 4 and {e.lane for e in exchanged} == {"exchange"}
    sent = {(e.kind, e.part) for e in measured.events if e.part >= 0}
    assert {("SEND.activations", 0), ("RECV.gradients", 1)} <= sent
    assert "EXCHANGE.sums" in (home / "many" / "timeline.html").read_text()
    result = invoke("trace", "diff", "many")
    assert result.exit_code == 0 and "OUTPUT_S" in result.stdout, result.stderr
    (last,) = [r for r in read_metrics(home / "many") if "measured_peak_bytes_1" in r]
    for worker in range(2):
        peak = last[f"measured_peak_bytes_{worker}"]
        assert peak <= last[f"predicted_peak_bytes_{worker}"] <= 1.05 * peak
    (record,) = [r for r in read_metrics(home / "many") if "workers_bytes_read" in r][-1:]
    crossed = 4 * 64 * 64 * 8  # rows, tokens, hidden numbers, bytes
    # Gradients of its output and the other's last output; sums of embeddings and of gradients, in
    # which a half comes twice; three numbers of each token's softmax.
    assert record["workers_bytes_read"] == 2 * crossed + 2 * crossed + 3 * 4 * 64 * 8
    train(3, "--resume", "many", "--mesh", "tensor=2")
    train(4, "--resume", "many", "--workers", 3)
    logs = sorted(path.name for path in (home / "many" / "workers").iterdir())
    assert logs == ["rank-1.log", "rank-2.log"]
    other = ("--mesh", "pipeline=2,data=2", "--set", "plan.pipeline=zb-h1+vocabulary:2")
    train(5, "--resume", "many", *other)

    found, wanted = numbers(home / "many"), numbers(home / "one")
    assert (4, "validation_loss") in wanted and found == pytest.approx(wanted, rel=1e-10)
    samples = [(home / run / "sample.txt").read_text() for run in ("one", "many")]
    assert samples[0] == samples[1]
    text = (home / "many" / "plan.yaml").read_text()
    plan = yaml.safe_load(text)
    assert plan["pipeline"]["vocabulary"] == 2 and plan["loss_chunk"] == 0
    assert from_yaml(text).pipeline.said == "zb-h1+vocabulary:2"


CUT = "plan.pipeline=1f1b+vocabulary:2"
SETS = {
    "no such variant": (
        "pipeline=2", ["plan.pipeline=1f1b+vocabulary:3"],
        "plan.pipeline: '1f1b+vocabulary:3': expected a schedule, or one with +vocabulary:1 or"
        " +vocabulary:2 behind it, as 1f1b+vocabulary:2",
    ),
    "no such thing": (
        "pipeline=2", ["plan.pipeline=gpipe+tables:2"], "behind it, as gpipe+vocabulary:2",
    ),
    "no such schedule": ("pipeline=2", ["plan.pipeline=1f2b+vocabulary:2"], "mean '1f1b'?"),
    "one worker": (
        "data=1", [CUT],
        "plan.pipeline is '1f1b+vocabulary:2' and mesh.pipeline is 1: a vocabulary is cut over the"
        " workers of a pipeline; set mesh to pipeline=2, or plan.pipeline to 1f1b",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", SETS.values(), ids=SETS)
def test_what_a_cut_vocabulary_cannot_do_is_one_line(case, home, invoke):
    mesh, sets, expected = case
    words = [word for one in sets for word in ("--set", one)]
    shown = invoke("train", "run.yaml", "--mesh", mesh, *words)
    assert shown.exit_code == 2 and not (home / "run").exists()
    assert shown.stderr.count("\n") == 1 and shown.stderr.startswith("error: ")
    assert expected in shown.stderr
