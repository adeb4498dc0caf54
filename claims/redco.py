"""Claim: two rules give a tensor-parallel plan for any language model, without configuration.

Tan et al., "Redco: A Lightweight Tool to Automate Distributed Training of LLMs on Any GPU/TPUs",
2023. Plans for architectures of transformers are derived from their unmodified code, run by two
workers and compared with the plain model: loss and every gradient. Needs transformers.

Jobs of every kind are three functions: the paper's kinds are language models (here T5 and GPT-J of
examples/three_functions.py), meta-learning (MAML on sines) and reinforcement learning (PPO's
clipped loss on a policy). Each trains and predicts on two workers, the language models on the data
and on the tensor axis, beside a plain loop over the same functions.
"""

from __future__ import annotations

import copy
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from verdict import Figure, conclude

import outsize
from outsize.collectives import Mesh, World, along
from outsize.parallel.automatic.apply import spread
from outsize.parallel.automatic.derive import derive

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
import three_functions as language
from foreign import IDS, MODELS, model_of
from threads import play

LEAST = 1e-6  # below it a gradient is rounding: that of a key's bias is zero, but for this
ROWS, EPOCHS, EXAMPLES = 8, 3, 24


def loss_of(model: nn.Module) -> Tensor:
    logits = model(input_ids=IDS).logits
    loss: Tensor = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), IDS[:, 1:].flatten())
    return loss


def examine(name: str) -> tuple[int, int, float, float]:
    """(rows found in a block, rows left whole, seconds, largest relative difference)."""
    plain = model_of(name)
    start = time.perf_counter()
    derived = derive(plain, 2, (IDS,))
    seconds = time.perf_counter() - start
    expected = loss_of(plain)
    expected.backward()

    def work(world: World) -> float:
        axis = along(world, "tensor")
        model = copy.deepcopy(plain)
        model.zero_grad()
        cuts = spread(model, derived, axis)
        loss = loss_of(model)
        loss.backward()
        worst = float((loss - expected).abs() / expected)
        for key, parameter in model.named_parameters():
            grad, whole = parameter.grad, plain.get_parameter(key).grad
            assert grad is not None and whole is not None
            if cuts[key].partial:
                axis.all_reduce(grad)
            scale = max(float(whole.abs().max()), LEAST)
            worst = max(worst, float((grad - cuts[key].of(whole)).abs().max()) / scale)
        return worst

    first = next(iter(derived.values()))
    return len(first.groups), len(first.left), seconds, max(play(Mesh(tensor=2), work))


# -- jobs of three functions -----------------------------------------------------------------------


class Sines(nn.Module):
    """MAML: weights after a step on a task's first points are judged on its others."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(
            torch.randn(shape) * 0.5 for shape in ((1, 16), (16,), (16, 1), (1,))
        )

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """x, y: (tasks, points, 1). Gives each task's loss, and its last points' values."""
        first, losses, values = x.shape[1] // 2, [], []
        for task in range(len(x)):
            with torch.enable_grad():
                own: Sequence[Tensor] = list(self.weights)
                near = F.mse_loss(self._of(own, x[task, :first]), y[task, :first])
                steps = torch.autograd.grad(near, own, create_graph=True)
            own = [w - 0.05 * step for w, step in zip(own, steps, strict=True)]
            values.append(self._of(own, x[task, first:]))
            losses.append(F.mse_loss(values[-1], y[task, first:]))
        return torch.stack(losses), torch.stack(values)

    def _of(self, weights: Sequence[Tensor], x: Tensor) -> Tensor:
        a, b, c, d = weights
        return torch.tanh(x @ a + b) @ c + d


def sine(seed: int) -> dict[str, Tensor]:
    draws = torch.Generator().manual_seed(seed)
    x, (high, shift) = torch.rand(10, 1, generator=draws) * 6, torch.rand(2, generator=draws) * 3
    return {"x": x.double(), "y": (high * torch.sin(x + shift)).double()}


def rollout(seed: int) -> dict[str, Tensor]:
    """What a policy of equal chances has done once: action 1 pays where the first number is
    large."""
    draws = torch.Generator().manual_seed(seed)
    seen = torch.randn(4, generator=draws)
    action = int(torch.rand((), generator=draws) < 0.5)
    pays = 1.0 if (seen[0] > 0) == bool(action) else -1.0
    facts = {"seen": seen, "action": torch.tensor(action), "pays": torch.tensor(pays)}
    return {k: v.double() if v.is_floating_point() else v for k, v in facts.items()}


class Policy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 16), nn.Linear(16, 2)

    def forward(self, seen: Tensor, action: Tensor, pays: Tensor) -> Tensor:
        """Logits of the actions; action and pays are for the loss."""
        logits: Tensor = self.last(torch.tanh(self.first(seen)))
        return logits


def clipped(logits: Tensor, batch: Any) -> Tensor:
    """PPO's: the ratio to the policy that acted, no further than 0.2 from 1."""
    chance = logits.softmax(-1).gather(1, batch["action"][:, None])[:, 0]
    ratio, pays = chance / 0.5, batch["pays"]
    return -torch.minimum(ratio * pays, ratio.clamp(0.8, 1.2) * pays).sum()


def stacked(examples: Sequence[Any]) -> dict[str, Tensor]:
    return {name: torch.stack([e[name] for e in examples]) for name in examples[0]}


@dataclass(frozen=True)
class Made:
    """A job: its model, its three functions, its examples, what the loss is divided by, meshes."""

    model: Callable[[], nn.Module]
    collate: Callable[[Sequence[Any]], Any]
    loss: Callable[[Any, Any], Tensor]
    predict: Callable[[Any, Any], Tensor]
    examples: Sequence[Any]
    count: Callable[[Any], float] | None = None
    meshes: tuple[str, ...] = ("data=2",)


def jobs() -> dict[str, Made]:
    both = ("data=2", "tensor=2")
    rows = language.make_examples(EXAMPLES)
    made = {
        name: Made(j.make, j.collate, j.loss, j.predict, rows, language.targets, both)
        for name, j in language.JOBS.items()
    }
    sines, acted = ([draw(i) for i in range(EXAMPLES)] for draw in (sine, rollout))
    made["MAML"] = Made(Sines, stacked, lambda out, _: out[0].sum(), lambda out, _: out[1], sines)
    made["PPO"] = Made(Policy, stacked, clipped, lambda out, _: out.softmax(-1), acted)
    return made


def started(made: Made) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = made.model().double()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)


def plainly(made: Made) -> tuple[list[float], list[float]]:
    """Losses of a plain loop over the same functions, and what it predicts in the end."""
    (model, optimizer), losses = started(made), []
    for epoch in range(EPOCHS):
        draws = torch.Generator().manual_seed(epoch)
        order = torch.randperm(EXAMPLES, generator=draws).tolist()
        for first in range(0, EXAMPLES, ROWS):
            batch = made.collate([made.examples[i] for i in order[first : first + ROWS]])
            loss = made.loss(model(**batch), batch) / (made.count(batch) if made.count else ROWS)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
    batch = made.collate(made.examples)
    with torch.no_grad():
        return losses, made.predict(model(**batch), batch).double().flatten().tolist()


def work(name: str, mesh: str) -> None:
    """One of two workers: prints what `plainly` gives."""
    torch.set_num_threads(1)
    made = jobs()[name]
    model, optimizer = started(made)
    task = outsize.Task(made.collate, made.loss, made.predict, made.count)
    job = outsize.prepare(model, optimizer, loss=task.loss, count=task.count, mesh=mesh)
    losses = task.fit(job, made.examples, ROWS, EPOCHS)
    found = torch.stack(task.predict(job, made.examples)).double().flatten().tolist()
    job.close()
    print(json.dumps([losses, found]))


def apart(name: str, mesh: str) -> float:
    """The largest difference of two workers' losses and predictions from a plain loop's."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = str(found.getsockname()[1])
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    command = [sys.executable, __file__, name, mesh]
    workers = [
        subprocess.Popen(
            command, env=os.environ | shared | {"RANK": str(rank)}, stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    said = [json.loads(worker.communicate(timeout=300)[0].splitlines()[-1]) for worker in workers]
    wanted = plainly(jobs()[name])
    return max(
        abs(a - b)
        for worker in said
        for mine, other in zip(worker, wanted, strict=True)
        for a, b in zip(mine, other, strict=True)
    )


def cut_whole(name: str) -> bool:
    """Whether every pair of layers of every block of a language model of the jobs is cut."""
    own = language.JOBS[name]
    batch = {**own.collate(language.make_examples(4)), "use_cache": False}
    return not any(one.left for one in derive(own.make(), 2, (), batch).values())


def main() -> None:
    found = {name: examine(name) for name in MODELS}
    for name, (groups, left, seconds, worst) in found.items():
        print(f"  {name:<22} {groups} of {groups + left} pairs, {seconds:.2f} s, {worst:.0e}")
    whole = [name for name, (_, left, _, _) in found.items() if not left]
    whole += [name for name in language.JOBS if cut_whole(name)]
    count = len(found) + len(language.JOBS)
    worst = max(difference for *_, difference in found.values())
    ran = {f"{name}, {m}": apart(name, m) for name, made in jobs().items() for m in made.meshes}
    for name, difference in ran.items():
        print(f"  {name:<22} {difference:.0e} from a plain loop")
    right = {n for n in jobs() if all(d < 1e-8 for k, d in ran.items() if k.startswith(n))}
    kinds = sum((bool(right >= {"t5", "gptj"}), "MAML" in right, "PPO" in right))
    conclude(
        'Tan et al., "Redco", 2023',
        "two rules derive tensor parallelism for any given LLM without further coding",
        f"{count} of {count} models right, {len(whole)} of them with every pair of layers"
        f" cut; largest relative difference {worst:.1e}; {kinds} of 3 kinds of job run by three"
        f" functions ({'; '.join(f'{name}: {d:.0e}' for name, d in ran.items())} from a plain"
        " loop's losses and predictions)",
        "tiny models of transformers' classes, 2 workers as threads, of jobs as processes, float64",
        Figure("configurations with every pair of layers cut", len(whole), count, "", nothing=0),
        Figure("kinds of job by three functions", kinds, 3, "", nothing=0),
        holds={
            "the plain model's numbers at 1e-10": worst < 1e-10,
            "pairs in every configuration": all(groups for groups, *_ in found.values()),
        },
    )


if __name__ == "__main__":
    work(*sys.argv[1:]) if len(sys.argv) > 1 else main()
