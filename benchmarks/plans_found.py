"""Plans that `outsize plan --hardware` finds for 4 to 8 workers of this machine, each of another
family, written, verified against plain PyTorch, and trained under for a few steps as they are.

The exit code is 1 where one does not hold.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

# Workers, model, what is required.
CASES = (
    (4, "tiny", "data=4,zero=0"), (4, "tiny", "data=4,zero=3"), (4, "tiny", "tensor=4"),
    (4, "mini", "pipeline=2,tensor=2,recompute=full"), (8, "mini", "data=2,pipeline=2,tensor=2"),
    (4, "mini", "pipeline=2,data=2,zero=1"), (8, "small", "data=8,shards=4"),
    (8, "small", "pipeline=2,chunks=3,tensor=2"), (6, "small", "data=3,tensor=2,zero=3"),
    (4, "tiny-experts", "expert=2,data=4,zero=0"), (4, "mini", "context=2,data=2"),
)  # fmt: skip
KEYS = ("train.sequence=32", "train.batch_tokens=1536", "precision=fp32")


def outsize(*words: str) -> str:
    """One command; what it printed. Raises CalledProcessError where it failed."""
    command = (sys.executable, "-m", "outsize", *words)
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    if done.returncode:
        raise RuntimeError((done.stderr or done.stdout).strip().splitlines()[-1])
    return done.stdout


def tried(workers: int, model: str, required: str, hardware: str, folder: Path) -> str:
    """What verify says of the plan, and that it trained."""
    path = str(folder / "plan.yaml")
    sets = [word for key in KEYS for word in ("--set", key)]
    outsize("plan", model, "--hardware", f"{workers} x {hardware}", *sets, "--require", required,
            "--out", path)  # fmt: skip
    verdict = outsize("verify", "--set", f"plan_file={path}", "--steps", "1").splitlines()[-1]
    outsize("train", "--plan", path, "--set", "train.steps=2", "--set", f"output={folder}/run")
    return verdict


def main() -> int:
    from outsize.hardware.form import dumps
    from outsize.hardware.probe import probe

    failed = 0
    with tempfile.TemporaryDirectory() as made:
        machine = Path(made) / "machine.yaml"
        machine.write_text(dumps(probe()))
        for number, (workers, model, required) in enumerate(CASES):
            folder = Path(made) / str(number)
            folder.mkdir()
            try:
                said = tried(workers, model, required, str(machine), folder)
            except RuntimeError as error:
                failed, said = failed + 1, f"FAILED: {error}"
            print(f"{workers} workers, {model}, {required}: {said}", flush=True)
    print(f"{len(CASES) - failed} of {len(CASES)} plans verify and train")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
