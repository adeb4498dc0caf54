"""Claim: where links between machines differ, a plan's stages lie along the fast ones.

Yim et al., "Pipette", 2024, over three network namespaces on this machine whose links have unequal
rates, as root: a plan of `outsize plan --hardware FILE` is trained by `outsize train --plan` where
the plan puts its stages, and as the machines are numbered. What is simulated is in pipette.py.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import yaml
from hosts import Hosts
from verdict import Figure, conclude

FAST, SLOW, SECONDS = 40e6, 4e6, 1e-4  # of the emulated links: bytes a second; one way
STEPS, WARM = 6, 2
SHARED = {
    "WORLD_SIZE": "3", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "10.77.0.1",
    "MASTER_PORT": "29511", "GLOO_SOCKET_IFNAME": "tun0", "OMP_NUM_THREADS": "1",
}  # fmt: skip


def planned(folder: Path) -> Path:
    """A plan of three stages for machines of which 0 and 1 have a slow link to each other."""
    hardware, plan = folder / "hardware.yaml", folder / "plan.yaml"
    rates = [[FAST if 2 in (i, j) else SLOW for j in range(3)] for i in range(3)]
    said = {"spec": "3 x this", "rates": rates, "unit": "B/s", "source": "emulated"}
    hardware.write_text(yaml.safe_dump(said))
    words = ["plan", "small", "--hardware", str(hardware), "--require", "pipeline=3,rows=4"]
    words += ["--forbid", "recompute", "--set", "train.sequence=256"]
    words += ["--set", "train.batch_tokens=8K", "--out", str(plan)]
    subprocess.run([sys.executable, "-m", "outsize", *words], check=True, capture_output=True)
    return plan


def trained(plan: Path, folder: Path) -> float:
    """Seconds of a step, the median of those behind the first."""
    rates = [[FAST if 2 in (i, j) else SLOW for j in range(3)] for i in range(3)]
    words = [sys.executable, "-m", "outsize", "train", "--plan", str(plan), "--set"]
    words += [f"train.steps={STEPS}", "--set", f"output={folder}", "--set", "threads=1"]
    with Hosts(3, SECONDS, rates) as hosts:
        started = []
        for rank in range(3):
            place = SHARED | {"RANK": str(rank), "GROUP_RANK": str(rank)}
            alone = f'hostname outsize-{rank} && exec "$@"'  # another machine to whoever asks
            command = ["unshare", "--uts", "sh", "-c", alone, "sh", *words]
            started.append(
                subprocess.Popen(
                    hosts.inside(rank, command), env=os.environ | place, text=True,
                    stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                )
            )  # fmt: skip
        said = [one.communicate(timeout=600)[0] for one in started]
    for one, text in zip(started, said, strict=True):
        assert one.returncode == 0, text[-2000:]
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    seconds = [found["seconds"] for line in lines if "seconds" in (found := json.loads(line))]
    return statistics.median(seconds[WARM:])


def run() -> tuple[float, float, list[int]]:
    """Seconds of a step where the plan puts its stages, as numbered; the plan's machines."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        plan = planned(folder)
        said = yaml.safe_load(plan.read_text())
        machines = said.pop("machines")
        numbered = folder / "numbered.yaml"
        numbered.write_text(yaml.safe_dump(said, sort_keys=False))
        return trained(plan, folder / "placed"), trained(numbered, folder / "numbered"), machines


def main() -> None:
    placed, numbered, machines = run()
    print(
        f"  (emulated links) machines {machines}: {placed:.2f} s a step, in turn {numbered:.2f} s"
    )
    conclude(
        'Yim et al., "Pipette", 2024',
        "a significant speedup over the prior art by which GPU has which worker",
        f"three stages over three namespaces: {numbered / placed:.2f} times as fast as the same"
        " plan on machines in turn",
        f"links of {FAST / 1e6:.0f} and {SLOW / 1e6:.0f} MB/s; a Llama of 6 blocks, 8 microbatches"
        " of 4 rows of 256 tokens, all steps of both plans ended; the abstract has no number",
        Figure("gain over namespaces", numbered / placed, None, how="emulated links", timed=True),
    )


if __name__ == "__main__":
    main()
