"""Claim: a model of low rank that first learns beside the full one is fine-tuned nearly as well.

Guo, Wang and Kankanhalli, "PELA: Learning Parameter-Efficient Models with Low-Rank Approximation",
2024 (arXiv 2310.10700): with 1/3 to 2/3 of the parameters gone, three vision models and one of
vision and language often lose about 0.6 points.

Here all is done by commands: a small decoder over bytes learns one half of Python's standard
library (`outsize train`), gets two factors a weight (`outsize convert --factored`), learns the same
text beside the full one (`pela`) and is fine-tuned on the package of e-mail. So are the full model,
which learns the same text as much longer, and the factors, without that stage and with as many
steps alone in its place. Quality is the share of next bytes of held-out files of that package that
`outsize eval` says are right.
"""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

from safetensors import safe_open
from verdict import Figure, conclude

CLAIMED, LEFT, RATIO = 0.006, 2 / 3, 2  # of accuracy; of the parameters; of a weight's numbers
BEFORE, BESIDE, STEPS, TOKENS, SEQUENCE, RATE = 2000, 150, 80, 512, 64, 3e-3
OPTIONS = {
    "data.tokenizer": "bytes", "train.batch_tokens": TOKENS, "train.sequence": SEQUENCE,
    "train.evaluate_every": 0, "train.save_every": 0, "sample.tokens": 0, "precision": "float32",
    "optimizer.lr": RATE,
}  # fmt: skip


def outsize(*words: object) -> str:
    """What a command prints."""
    command = [sys.executable, "-m", "outsize", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stderr)
    return done.stdout


def train(output: Path, model: object, data: Path, steps: int, **keys: object) -> Path:
    """A run; its directory."""
    said = OPTIONS | {"data.cache": output.parent / "cache"}
    said |= {name.replace("__", "."): value for name, value in keys.items()}
    said |= {"model": model, "data": data, "train.steps": steps, "output": output}
    outsize("train", *(word for key in said for word in ("--set", f"{key}={said[key]}")))
    return output


def right(model: Path, text: Path) -> float:
    """The share of next bytes that a model has right."""
    said = outsize("eval", model, "--on", text, "--sequence", SEQUENCE, "--json")
    return float(json.loads(said)["right"])


def parameters(model: Path) -> int:
    """Of a model's directory, or a run's."""
    found = next(iter([*model.glob("step-*/model.safetensors"), *model.glob("model.safetensors")]))
    with safe_open(found, "pt") as file:
        return sum(file.get_tensor(name).numel() for name in file.keys())  # noqa: SIM118


def texts(folder: Path) -> tuple[Path, Path, Path]:
    """What is learnt first, what is tuned on, and what is held out."""
    library = Path(sysconfig.get_paths()["stdlib"])

    def joined(name: str, files: list[Path], most: int) -> Path:
        found = b"\n".join(one.read_bytes() for one in files)[:most]
        (folder / name).write_bytes(found)
        return folder / name

    mail = sorted(library.glob("email/*.py"))
    cut = len(mail) * 3 // 4
    return (
        joined("general.txt", sorted(library.glob("[a-m]*.py")), 1 << 21),
        joined("mail.txt", mail[:cut], 1 << 20),
        joined("held.txt", mail[cut:], 1 << 16),
    )


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        general, mail, held = texts(folder)
        full = train(folder / "full", "tiny", general, BEFORE)
        low = folder / "low"
        outsize("convert", full, "--factored", RATIO, "--into", low)
        taught = {"plan__approximate": "[pela]", "pela__teacher": full}
        models = {
            "full": train(folder / "longer", full, general, BESIDE),
            "factors": low,
            "alone": train(folder / "alone", low, general, BESIDE),
            "PELA": train(folder / "beside", low, general, BESIDE, **taught),
        }
        share, found = parameters(low) / parameters(full), dict[str, float]()
        for what, model in models.items():
            found[what] = right(train(folder / f"{what}-tuned", model, mail, STEPS), held)
            print(f"  {what}: {found[what]:.2%} right", flush=True)
    lost, alone, plain = (found["full"] - found[what] for what in ("PELA", "alone", "factors"))
    smaller = "a small decoder over bytes"
    conclude(
        'Guo, Wang and Kankanhalli, "PELA", 2024',
        "about 0.6 points lost with 1/3 to 2/3 of the parameters gone",
        f"{lost:.2%} of next bytes lost with {share:.2f}x the parameters; {alone:.2%} where the"
        f" factors learn as long without the full model, {plain:.2%} where they are tuned at once",
        f"run: the preset tiny, {BEFORE} steps of {TOKENS} bytes of Python files, {BESIDE} more,"
        f" beside the full model or not, {STEPS} on files of e-mail, float32",
        Figure("points lost", lost, CLAIMED, "%", nothing=alone, less=True, other=smaller),
        Figure("parameters left", share, LEFT, less=True, other=smaller),
    )


if __name__ == "__main__":
    main()
