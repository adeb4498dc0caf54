"""What runs leave behind, compared."""

from __future__ import annotations

from pathlib import Path

from forked import until

from outsize.train.metrics import read_metrics


class DeathError(Exception):
    """What a run dies of here."""


def files_of(directory: Path) -> dict[str, bytes]:
    """The tensor files of a run's last checkpoint."""
    last = directory / (directory / "latest").read_text().strip()
    return {path.name: path.read_bytes() for path in sorted(last.glob("*.safetensors"))}


def assert_same_run(one: Path, other: Path) -> None:
    assert files_of(one) == files_of(other)
    assert read_metrics(one, timed=False) == read_metrics(other, timed=False)


def wait_for_step(run: Path, step: int) -> None:
    def reached() -> bool:
        told = (run / "metrics.jsonl").exists() and read_metrics(run)
        return any(record["step"] >= step for record in told or ())

    assert until(reached, 600.0), f"step {step} was not reached"
