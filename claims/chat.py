"""Claim: chats train on what the assistant says alone, and learn it in fewer steps than as text.

No paper's figure: that supervised fine-tuning takes its loss on the answers goes back to Ouyang et
al., "Training language models to follow instructions with human feedback", 2022, which gives none
for it. What is shown is that the joint works from the command to the model: the same chats, once
with `data.chat` and once written out as text (every token a target), for as many steps from the
same initial values. The prompts are mostly noise, which text training spends its gradient on; an
answer follows from one word of the prompt. Loss of held-out answers is measured on the checkpoints
in a plain loop.
"""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from torch.nn import functional as F
from verdict import Figure, conclude

import outsize

CHATS, HELD, NOISE, STEPS = 600, 60, 24, 100
WORDS = ("apple", "brick", "cloud", "daisy", "ember", "fjord", "grape", "heron")
ANSWERS = ("red", "rust", "white", "yellow", "orange", "blue", "purple", "grey")
OPTIONS = {
    "model": "tiny", "data.validation": 0, "train.steps": STEPS, "train.sequence": 128,
    "train.batch_tokens": 1024, "train.evaluate_every": 0, "train.save_every": 0,
    "sample.tokens": 0, "precision": "float32", "optimizer.lr": 3e-3,
}  # fmt: skip


def chat(draw: random.Random) -> list[dict[str, str]]:
    noise = "".join(draw.choice("0123456789abcdef") for _ in range(NOISE))
    at = draw.randrange(len(WORDS))
    return [
        {"role": "user", "content": f"{noise} {WORDS[at]}?"},
        {"role": "assistant", "content": ANSWERS[at]},
    ]


def written(messages: list[dict[str, str]]) -> tuple[str, str]:
    """ChatML: what is before the answer, and the answer with its end."""
    user, assistant = (one["content"] for one in messages)
    head = f"<|im_start|>user\n{user}<|im_end|>\n<|im_start|>assistant\n"
    return head, f"{assistant}<|im_end|>"


def train(folder: Path, name: str, **keys: object) -> tuple[Path, str]:
    """A run by its command; its checkpoint, and what it printed."""
    values = OPTIONS | {key.replace("__", "."): value for key, value in keys.items()}
    values["output"] = folder / name
    values["data.cache"] = folder / "cache"
    words = [word for key, value in values.items() for word in ("--set", f"{key}={value}")]
    command = [sys.executable, "-m", "outsize", "train", *words]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    if run.returncode:
        sys.exit(run.stderr)
    return folder / name / f"step-{STEPS:08d}", run.stdout


@torch.no_grad()
def answered(checkpoint: Path, chats: list[list[dict[str, str]]]) -> float:
    """Nats a byte of the answers."""
    model = outsize.load(str(checkpoint))
    total, count = 0.0, 0
    for one in chats:
        head, answer = (part.encode() for part in written(one))
        ids = torch.tensor([list(head + answer)])
        logits = model(ids)[0, len(head) - 1 : -1].float()
        total += float(F.cross_entropy(logits, ids[0, len(head) :], reduction="sum"))
        count += len(answer)
    return total / count


def main() -> None:
    draw = random.Random(0)
    chats = [chat(draw) for _ in range(CHATS + HELD)]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        trained, held = chats[:CHATS], chats[CHATS:]
        records = [json.dumps({"messages": one}) for one in trained]
        (folder / "chats.jsonl").write_text("\n".join(records))
        texts = [json.dumps({"text": "".join(written(one)) + "\n"}) for one in trained]
        (folder / "texts.jsonl").write_text("\n".join(texts))
        as_chats, printed = train(
            folder, "chats", data__path=folder / "chats.jsonl", data__chat__template="chatml"
        )
        as_text, _ = train(folder, "text", data__path=folder / "texts.jsonl")
        own, plain = answered(as_chats, held), answered(as_text, held)
    share = re.search(r"\(([\d.]+%) of them targets\)", printed)
    assert share is not None, printed
    conclude(
        "Ouyang et al., 2022, describe it without a figure; this proves the joint of source and"
        " loss",
        "answers learnt in fewer steps than as text",
        f"{plain / own:.1f}x: {own:.3f} nats a byte of an answer, {plain:.3f} as text;"
        f" {share[1]} of the tokens are targets",
        f"run: preset tiny, bytes, {CHATS} chats, {STEPS} steps of 1,024 tokens",
        Figure("loss of answers as text over as chats", plain / own, None),
    )


if __name__ == "__main__":
    main()
