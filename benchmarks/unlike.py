"""Two unlike workers: a step's rows shared by speed against equal shares, and the forecast of both.

One worker has a core (or a part of it, --core), the other is held to half of that by a control
group (version 1, as root). A core is probed, and declared at the rates that each is held to, so
that both files are of one measurement. `outsize plan --hardware` finds the shares, and
`outsize train --plan` runs them and equal ones in turn. The exit code is 1 where something is
missed: 1.25 times over equal shares, 10% of the forecast, losses that agree. That shares are exact
is for `outsize verify` to say (tests/runtime/test_row_shares.py).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from support.cgroup import ENTER

ROOT = Path("/sys/fs/cgroup/cpu")
PERIOD = 20_000  # microseconds: short, so that a step is not stopped for long at once
WARM, PORT = 2, 29517
ONE = {"OMP_NUM_THREADS": "1"}
LEAST, WITHIN, SAME = 1.25, 0.10, 1e-4  # gain; of the forecast; of losses in float32
PROBE = (
    "from outsize.hardware.form import dumps; from outsize.hardware.probe import probe;"
    " print(dumps(probe()))"
)


@contextlib.contextmanager
def held(cores: float, name: str) -> Iterator[Path]:
    """A group that may use so many cores."""
    group = ROOT / f"outsize-unlike-{os.getpid()}-{name}"
    try:
        group.mkdir()
    except OSError:
        raise SystemExit(f"{ROOT} is not writable; run as root with cgroups version 1") from None
    (group / "cpu.cfs_period_us").write_text(str(PERIOD))
    (group / "cpu.cfs_quota_us").write_text(str(int(PERIOD * cores)))
    try:
        yield group
    finally:
        group.rmdir()


def within(
    group: Path, core: int, command: list[str], env: dict[str, str]
) -> subprocess.Popen[str]:
    """A command in a group, on one core."""
    return subprocess.Popen(
        ["taskset", "-c", str(core), "sh", "-c", ENTER, str(group), *command],
        env=os.environ | ONE | env, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )  # fmt: skip


def ended(*started: subprocess.Popen[str]) -> list[str]:
    said = [one.communicate(timeout=900)[0] for one in started]
    for one, text in zip(started, said, strict=True):
        if one.returncode:
            raise SystemExit(text[-2000:])
    return said


def outsize(*words: str) -> list[str]:
    return [sys.executable, "-m", "outsize", *words]


def declared(found: Any, part: float) -> Any:
    """A machine's file at a part of its rates."""
    if isinstance(found, list):
        return [declared(one, part) for one in found]
    if not isinstance(found, dict):
        return found
    made = {name: declared(one, part) for name, one in found.items()}
    scale = {"FLOP/s": part, "B/s": part, "s": 1 / part}.get(str(made.get("unit")))
    return made if scale is None else made | {"value": made["value"] * scale}


def planned(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Probe a core; the plan of shares in shares.yaml, of equal ones in equal.yaml. Gives what was
    forecast."""
    whole = ["taskset", "-c", "0", sys.executable, "-c", PROBE]
    probed = subprocess.run(
        whole, env=os.environ | ONE, check=True, capture_output=True, text=True
    ).stdout
    files = [folder / "fast.yaml", folder / "slow.yaml"]
    for file, part in zip(files, (options.core, options.core / 2), strict=True):
        file.write_text(yaml.safe_dump(declared(yaml.safe_load(probed), part), sort_keys=False))
    plan = folder / "shares.yaml"
    words = ["plan", options.model, "--hardware", f"{files[0]} + {files[1]}", "--json"]
    words += ["--require", "pipeline=1,tensor=1,zero=0,recompute=none", "--out", str(plan)]
    tokens = options.sequence * options.rows
    for key in (f"train.sequence={options.sequence}", f"train.batch_tokens={tokens}"):
        words += ["--set", key]
    done = subprocess.run(
        outsize(*words, "--set", "precision=fp32"), capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(done.stderr or done.stdout)
    best: dict[str, Any] = json.loads(done.stdout)["plans"][0]
    said = yaml.safe_load(plan.read_text())
    own = -(-options.rows // 2)
    said["plan"] |= {"row_shares": [], "microbatch_rows": -(-own // best["microbatches"])}
    (folder / "equal.yaml").write_text(yaml.safe_dump(said, sort_keys=False))
    return best


def trained(plan: Path, groups: list[Path], steps: int, output: Path) -> tuple[float, list[float]]:
    """Median seconds of a step behind the first ones, and all losses."""
    words = outsize("train", "--plan", str(plan), "--set", f"train.steps={steps}")
    words += ["--set", f"output={output}", "--set", "threads=1"]
    place = {
        "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0", "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(PORT),
    }  # fmt: skip
    ended(*(
        within(group, rank, words, place | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank, group in enumerate(groups)
    ))  # fmt: skip
    lines = map(json.loads, (output / "metrics.jsonl").read_text().splitlines())
    found = [line for line in lines if "seconds" in line and "loss" in line]
    return statistics.median(f["seconds"] for f in found[WARM:]), [f["loss"] for f in found]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--core", type=float, default=1.0, help="of a core, of the fast worker")
    parser.add_argument("--model", default="mini")
    parser.add_argument("--sequence", type=int, default=256)
    parser.add_argument("--rows", type=int, default=12, help="of a step")
    parser.add_argument("--steps", type=int, default=8)
    options = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as name, held(options.core, "fast") as fast,
        held(options.core / 2, "slow") as slow,
    ):  # fmt: skip
        return compared(options, [fast, slow], Path(name))


def compared(options: argparse.Namespace, groups: list[Path], folder: Path) -> int:
    best = planned(options, folder)
    took: dict[str, list[float]] = {"shares": [], "equal": []}
    losses: dict[str, list[float]] = {}
    for bout in range(2):
        for name in took:
            output = folder / f"{name}-{bout}"
            seconds, losses[name] = trained(folder / f"{name}.yaml", groups, options.steps, output)
            took[name].append(seconds)
    shares, equal = (statistics.median(took[name]) for name in ("shares", "equal"))
    off = best["step_seconds"] / shares - 1
    apart = max(abs(a / b - 1) for a, b in zip(losses["shares"], losses["equal"], strict=True))
    print(f"rows {best['row_shares']}, {best['microbatches']} microbatches; two bouts each")
    print(f"by speed {shares:.3f} s a step, equal {equal:.3f} s: {equal / shares:.2f} times")
    print(f"forecast {best['step_seconds']:.3f} s: {off:+.1%}; losses agree to {apart:.1g}")
    return int(equal / shares < LEAST or abs(off) > WITHIN or apart > SAME)


if __name__ == "__main__":
    sys.exit(main())
