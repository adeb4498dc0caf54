"""A run as a plain loop, written out from the run's keys: rows in the order of the seed, learning
rates, clipping, the loss's terms, evaluations. It shares with a run the modules of the model, the
permutation of a seed and the masks of dropout.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import torch

from outsize.checkpoint import hub
from outsize.data import IGNORE, Batch, DataConfig, open_data
from outsize.data.packing import permutation
from outsize.kernels.entropy import LossOptions
from outsize.models.build import build
from outsize.models.dropout import Noise
from outsize.models.families import parse
from outsize.models.random import uniform
from outsize.optim import SGD, AdamW, Muon
from outsize.verify import plain
from outsize.verify.naive import NativeLoss

MODEL = {
    "model_type": "llama", "hidden_size": 8, "intermediate_size": 12, "vocab_size": 257,
    "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
    "max_position_embeddings": 32, "rms_norm_eps": 1e-5, "hidden_act": "silu",
    "tie_word_embeddings": True,
}  # fmt: skip


def spelled(value: object) -> object:
    """As --set takes it."""
    if value is None or isinstance(value, (list, bool)):
        return json.dumps(value)
    return value


class Home:
    """Documents, a model to begin with, and one with weights."""

    def __init__(self, home: Path) -> None:
        self.home = home
        texts = [f"def f{i}(x):\n    return x ** {i}\n" for i in range(12)]
        lines = [json.dumps({"body": t, "text": t[::-1]}) + "\n" for t in texts]
        (home / "text").mkdir()
        (home / "text" / "a.jsonl").write_text("".join(lines))
        (home / "text" / "b.txt").write_text("not of the kind that the runs read\n")
        (home / "random").mkdir()
        (home / "random" / "config.json").write_text(json.dumps(MODEL))
        self.config = parse(MODEL)
        hub.save(build(self.config, 11, dtype=torch.float64), home / "stored")

    def sets(self, values: dict, **more: object) -> list[str]:
        """What a run of these values is told."""
        own = {k: v for k, v in values.items() if k.partition(".")[0] not in ("sgd", "muon")}
        named = values.get("optimizer.name")
        own |= {k: v for k, v in values.items() if k.startswith(f"{named}.")}
        own |= {"model.name": self.home / values.get("model.weights", "random"),
                "data.path": self.home / "text", "data.kind": "jsonl", "data.field": "body",
                "data.tokenizer": "bytes", "data.validation": 0.25,
                "data.cache": self.home / "cache", "output": self.home / "run"}  # fmt: skip
        own |= {k.replace("__", "."): v for k, v in more.items()}
        return [f"{key}={spelled(value)}" for key, value in own.items()]

    def data(self):
        """The documents as a run has them."""
        return open_data(
            DataConfig(str(self.home / "text"), "jsonl", "body", "bytes", 0.25,
                       str(self.home / "cache"))
        )  # fmt: skip


def laid(data, seed: int, epoch: int):
    """The stream of an epoch: targets, what is read before each, and where documents begin."""
    starts = [0, *data.ends[:-1].tolist()]
    spans = [(starts[i], int(data.ends[i])) for i in permutation("documents", seed, epoch,
                                                                   data.documents)]  # fmt: skip
    targets = np.concatenate([data.tokens_N[a:b] for a, b in spans]).astype(np.int64)
    read = np.concatenate([[data.start, *data.tokens_N[a : b - 1]] for a, b in spans])
    return targets, read.astype(np.int64), np.cumsum([0, *(b - a for a, b in spans)])


def batch_of(stream, rows, sequence: int, start: int) -> Batch:
    """Rows of a stream; past its end start tokens that are no target."""
    targets, read, begins = stream
    ids, wanted, bounds = [], [], []
    for row in rows:
        at, stop = row * sequence, min((row + 1) * sequence, len(targets))
        lack = (row + 1) * sequence - stop
        ids.append([*read[at:stop], *[start] * lack])
        wanted.append([*targets[at:stop], *[IGNORE] * lack])
        inside = [int(b) - at for b in begins if at < b < stop]
        bounds.append((0, *inside, *((stop - at,) if lack else ()), sequence))
    return Batch(torch.tensor(np.array(ids)), torch.tensor(np.array(wanted)), tuple(bounds))


def trained_on(data, v: dict, step: int) -> Batch:
    """The rows of a step, in the order of the seed, epoch after epoch."""
    seed, sequence = v["train.seed"], v["train.sequence"]
    each, count = data.tokens // sequence, v["train.batch_tokens"] // sequence
    parts = []
    for sample in range(step * count, (step + 1) * count):
        epoch, index = divmod(sample, each)
        row = permutation("rows", seed, epoch, each)[index]
        parts.append(batch_of(laid(data, seed, epoch), [row], sequence, data.start))
    noise = Noise(v["train.dropout"], seed, step)
    ids, targets = (torch.cat([getattr(p, n) for p in parts]) for n in ("ids_BS", "targets_BS"))
    return Batch(ids, targets, tuple(p.bounds[0] for p in parts), noise)


def held_out(data, v: dict) -> Batch:
    """The validation rows: the first tokens in one order for all seeds, whole rows of them."""
    sequence = v["train.sequence"]
    count = -(-min(v["train.evaluate_tokens"], data.tokens) // sequence)
    return batch_of(laid(data, 0, 0), range(count), sequence, data.start)


def rate(v: dict, step: int) -> float:
    """The learning rate of a step, from 0."""
    steps, warmup = v["train.steps"], v["learning_rate.warmup"]
    final, shape = v["learning_rate.final"], v["learning_rate.shape"]
    if step < warmup:
        return v["optimizer.lr"] * (step + 1) / warmup
    begin = max(warmup, round(steps * (1 - v["learning_rate.decay"]))) if shape == "wsd" else warmup
    done = max(0, step - begin) / (steps - begin)
    left = (1 + math.cos(math.pi * done)) / 2 if shape == "cosine" else 1 - done
    return v["optimizer.lr"] * (1.0 if shape == "constant" else final + (1 - final) * left)


def optimizer(v: dict):
    lr, betas, decay = v["optimizer.lr"], tuple(v["optimizer.betas"]), v["optimizer.weight_decay"]
    adamw = AdamW(lr, betas, 1e-8, decay)
    return {
        "adamw": adamw,
        "sgd": SGD(lr, v["sgd.momentum"], decay),
        "muon": Muon(lr, v["muon.momentum"], weight_decay=decay, rest=adamw),
    }[v["optimizer.name"]]


def foretold(home: Home, v: dict) -> list[dict[str, float]]:
    """What a run of these values writes down."""
    data = home.data()
    model = build(home.config, v["train.seed"], dtype=torch.float64)
    if v["model.weights"] == "stored":
        model = hub.load(home.home / "stored", torch.float64)
    masters = dict(model.named_parameters())
    inner = {n for n, p in masters.items() if n.startswith("blocks.") and p.ndim == 2}
    loss = NativeLoss(model, LossOptions(v["train.label_smoothing"], v["train.z_loss"]), ())
    held, bare, every = held_out(data.validation, v), NativeLoss(model, LossOptions()), {}

    def evaluate(step: int) -> None:
        with torch.no_grad():
            nats, count = bare(held)
        every[step] = float(nats) / count

    def looked(batch):
        step = batch.noise.step
        if step and step % v["train.evaluate_every"] == 0:
            evaluate(step)
        return loss(batch)

    steps = range(v["train.steps"])
    rates = tuple(rate(v, step) for step in steps)
    recipe = plain.Recipe(optimizer(v), rates, v["train.clip"], frozenset(inner))
    batches = [trained_on(data.train, v, step) for step in steps]
    found = plain.train(plain.Plain(model, looked, masters), recipe, batches)
    evaluate(len(found))
    records = []
    for i, (step, lr) in enumerate(zip(found, rates, strict=True), 1):
        records.append({"step": i, "loss": step.loss, "gradient_norm": step.norm, "lr": lr})
        if i in every:
            records.append({"step": i, "validation_loss": every[i]})
    return records


def sampled(model: Path, prompt: str, tokens: int, temperature: float, seed: int) -> str:
    """The sample of a run in bytes, by the whole text through the model for each token."""
    decoder, ids = hub.load(model, torch.float64), [256, *prompt.encode()]
    with torch.no_grad():
        for index in range(tokens):
            scores = decoder(torch.tensor([ids]))[0, -1]
            token = int(scores.argmax())
            if temperature:
                total = (scores / temperature).softmax(-1).cumsum(0)
                token = int((total <= uniform(seed, "sample", index, index + 1)[0]).sum())
            if token == 256:
                break
            ids.append(token)
    return bytes(ids[1:]).decode("utf-8", "replace")


def flat(records) -> list[tuple[str, float]]:
    names = ("step", "loss", "gradient_norm", "lr", "validation_loss")
    told = [r for r in records if "loss" in r or "validation_loss" in r]
    return [(n, r[n]) for r in told for n in names if n in r]


def apart(one, other) -> bool:
    """Whether two runs differ by more than rounding."""
    if [n for n, _ in one] != [n for n, _ in other]:
        return True
    return any(abs(a - b) > 1e-8 * abs(b) for (_, a), (_, b) in zip(one, other, strict=True))
