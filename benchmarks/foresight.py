"""Thirty varied runs of this machine, foretold and measured, and the planner's choice beside them.

Each question is a model with its rows, its workers and its memory; its alternatives fix the plan in
different ways, one more leaves it to the planner. Every run trains for a few steps in a process of
its own whose cache knows the machine's rates and no earlier run. What is done is saved at once, and
a run that is saved is not made again. The exit code is 1 where a target is missed. README.md.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from support.figures import markdown
from support.turns import QUIET, busy

MEMORY, MIDDLE, WORST, CHOICE = 0.05, 0.10, 0.20, 0.03  # targets: parts of what was measured
PLANNED = "the planner's own"
AGAIN = ", again"
LONGEST = 600.0  # seconds of one run
STEPS, SEQUENCE = 16, 256
MIB = 2**20
Sets = tuple[str, ...]


@dataclass(frozen=True)
class Question:
    """keys: of every run; alternatives: by name, the keys that fix its plan. elsewhere: whether the
    choice is that of `outsize plan --hardware`; else of `outsize train`, which plans alone."""

    name: str
    model: str
    rows: int
    workers: int
    alternatives: Mapping[str, Sets]
    keys: Sets = ()
    elsewhere: bool = True
    steps: int = STEPS

    def sets(self) -> Sets:
        """Of every run."""
        tokens = self.rows * SEQUENCE
        return (f"model.name={self.model}", f"train.sequence={SEQUENCE}",
                f"train.batch_tokens={tokens}", f"train.steps={self.steps}",
                "precision=float32", "device=cpu", "train.evaluate_every=0",
                "train.save_every=0", "sample.tokens=0", *self.keys)  # fmt: skip


def _mesh(axes: str, *others: str) -> Sets:
    return (f"mesh={axes}", *others)


BLOCK = "plan.recompute=[block]"
QUESTIONS = (
    Question("one worker", "small", 16, 1, {
        "a row at a time": ("plan.microbatch_rows=1",),
        "four rows": ("plan.microbatch_rows=4",),
        "all rows": ("plan.microbatch_rows=16",),
        "blocks recomputed": ("plan.microbatch_rows=4", BLOCK),
    }, elsewhere=False),
    Question("one worker, within 300 MiB, a disk", "25m", 8, 1, {
        "a row at a time": ("plan.microbatch_rows=1", "plan.recompute=[]"),
        "a row, recomputed": ("plan.microbatch_rows=1", BLOCK),
        "two rows, recomputed": ("plan.microbatch_rows=2", BLOCK),
        "small chunks": ("plan.microbatch_rows=1", BLOCK, "plan.loss_chunk=64"),
    }, ("memory=300MiB", "disk=DISK:4GiB"), elsewhere=False, steps=8),
    Question("two workers", "small", 16, 2, {
        "whole states": _mesh("data=2", "plan.zero=0"),
        "states cut": _mesh("data=2", "plan.zero=1"),
        "gradients cut": _mesh("data=2", "plan.zero=2"),
        "all cut": _mesh("data=2", "plan.zero=3"),
        "tensor": _mesh("tensor=2"),
        "1f1b": _mesh("pipeline=2", "plan.pipeline=1f1b", "plan.microbatch_rows=4"),
        "zb-h1": _mesh("pipeline=2", "plan.pipeline=zb-h1", "plan.microbatch_rows=4"),
    }),
    Question("four workers", "small", 16, 4, {
        "all cut": _mesh("data=4", "plan.zero=3"),
        "data and tensor": _mesh("data=2,tensor=2"),
        "tensor": _mesh("tensor=4"),
        "gpipe": _mesh("pipeline=4", "plan.pipeline=gpipe", "plan.microbatch_rows=2"),
        "1f1b": _mesh("pipeline=4", "plan.pipeline=1f1b", "plan.microbatch_rows=2"),
        "interleaved": _mesh("pipeline=2,data=2", "plan.pipeline=interleaved:2",
                             "plan.microbatch_rows=2"),
        "v-half": _mesh("pipeline=2,data=2", "plan.pipeline=v-half", "plan.microbatch_rows=2"),
    }),
    Question("eight workers", "small", 16, 8, {
        "states cut": _mesh("data=8", "plan.zero=1"),
        "all cut": _mesh("data=8", "plan.zero=3"),
        "three axes": _mesh("pipeline=2,data=2,tensor=2", "plan.microbatch_rows=2"),
        "pipeline and data": _mesh("pipeline=4,data=2", "plan.microbatch_rows=2"),
    }),
    Question("experts", "tiny-experts", 16, 2, {
        "experts cut": _mesh("expert=2", "plan.zero=0"),
        "data": _mesh("data=2", "plan.zero=1"),
    }),
    Question("two workers, within 220 MiB each, a disk", "25m", 8, 2, {
        "all cut": _mesh("data=2", "plan.zero=3", "plan.microbatch_rows=1"),
        "states cut": _mesh("data=2", "plan.zero=1", "plan.microbatch_rows=1", BLOCK),
    }, ("memory=220MiB", "disk=DISK:4GiB", "workers=2"), elsewhere=False, steps=8),
)  # fmt: skip


@dataclass(frozen=True)
class Found:
    """One run. foretold: seconds of a step as it began; rates: by the machine's rates alone; bytes:
    foretold, measured; others: percent of the cores that others kept busy before it."""

    question: str
    name: str
    foretold: float
    rates: float
    measured: float
    bytes: tuple[int, int]
    others: float
    plan: str = ""

    @property
    def off(self) -> float:
        return self.foretold / self.measured - 1


class Refused(Exception):
    """A run that did not come about, with the reason."""


# -- runs ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bench:
    """folder: of text, rates, disks and runs."""

    folder: Path

    @classmethod
    def made(cls, folder: Path) -> Bench:
        """With text to learn from, and this machine's rates at each number of threads."""
        import torch

        from outsize.hardware.form import dumps
        from outsize.hardware.host import cores
        from outsize.hardware.probe import keep, probe, user_cache

        draw = random.Random(0)
        words = ["".join(draw.choices("abcdefghij", k=draw.randint(2, 9))) for _ in range(999)]
        for name in ("text", "cache/outsize", "disk"):
            (folder / name).mkdir(parents=True)
        for number in range(20):
            text = " ".join(draw.choices(words, k=20_000))
            (folder / "text" / f"{number}.txt").write_text(text, encoding="utf-8")
        cache = folder / "cache" / "outsize"
        kernels = user_cache() / "kernels"
        if kernels.is_dir():
            shutil.copytree(kernels, cache / "kernels")
        for threads in range(1, cores() + 1):
            torch.set_num_threads(threads)
            found = probe("cpu", fresh=True)
            keep(found, cache=cache)
        (folder / "machine.yaml").write_text(dumps(found), encoding="utf-8")
        return cls(folder)

    def run(self, question: Question, name: str, sets: Sets, seconds: float) -> Found:
        """One alternative, or the planner's. Raises Refused."""
        others, run = busy(), self.folder / "run"
        shutil.rmtree(run, ignore_errors=True)
        (self.folder / "cache" / "outsize" / "history.jsonl").unlink(missing_ok=True)
        until = time.monotonic() + min(LONGEST, seconds)
        words: list[str] = ["train"]
        if name.startswith(PLANNED) and question.elsewhere:
            words += ["--plan", self._planned(question, until)]
        told = (*question.sets(), *sets, f"output={run}", f"data.path={self.folder / 'text'}")
        self._outsize(until, *words, *_options(told, self.folder / "disk"))
        records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        (last,) = [each for each in records if "measured_step_seconds" in each]
        kept = self.folder / "cache" / "outsize" / "history.jsonl"
        entries = [json.loads(line) for line in kept.read_text(encoding="utf-8").splitlines()]
        (rates,) = [each["seconds"][0] for each in entries if each["by"] == "rates"]
        return Found(
            question.name, name, last["predicted_step_seconds"], rates,
            last["measured_step_seconds"],
            (last["predicted_peak_bytes"], last["measured_peak_bytes"]), others,
            entries[0]["mesh"],
        )  # fmt: skip

    def _planned(self, question: Question, until: float) -> str:
        """A file of the layout that is chosen for workers of this machine."""
        path = str(self.folder / "plan.yaml")
        keys = (f"train.sequence={SEQUENCE}", f"train.batch_tokens={question.rows * SEQUENCE}",
                "precision=fp32")  # fmt: skip
        spec = f"{question.workers} x {self.folder / 'machine.yaml'}"
        sets = [word for key in keys for word in ("--set", key)]
        self._outsize(
            until, "plan", question.model, "--hardware", spec, *sets, "--require",
            f"devices={question.workers}", "--out", path,
        )  # fmt: skip
        return path

    def _outsize(self, until: float, *words: str) -> None:
        command = (sys.executable, "-m", "outsize", *words)
        environment = {**os.environ, "XDG_CACHE_HOME": str(self.folder / "cache")}
        left = until - time.monotonic()
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, check=False, timeout=max(1.0, left),
                env=environment, cwd=self.folder,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            raise Refused("it was stopped, as it took too long") from None
        if done.returncode:
            raise Refused((done.stderr or done.stdout).strip().splitlines()[-1])


def _options(sets: Sequence[str], disk: Path) -> list[str]:
    return [word for one in sets for word in ("--set", one.replace("DISK", str(disk)))]


def runs(questions: Sequence[Question]) -> Iterator[tuple[Question, str, Sets]]:
    """Each to be made."""
    for question in questions:
        yield from ((question, name, sets) for name, sets in question.alternatives.items())
        yield question, PLANNED, _own(question)


def _own(question: Question) -> Sets:
    """What the planner is told."""
    alone = question.workers > 1 and not question.elsewhere
    return (f"mesh=data={question.workers}",) if alone else ()


def again(
    questions: Sequence[Question], found: Sequence[Found]
) -> Iterator[tuple[Question, str, Sets]]:
    """The best alternative of each question and the planner's own once more, one behind the other:
    over the minutes that all of them take a machine's pace drifts by more than they differ."""
    for question in questions:
        mine = {one.name: one.measured for one in found if one.question == question.name}
        others = [name for name in question.alternatives if name in mine]
        if PLANNED in mine and others:
            best = min(others, key=mine.__getitem__)
            yield question, best + AGAIN, question.alternatives[best]
            yield question, PLANNED + AGAIN, _own(question)


def made(
    todo: Sequence[tuple[Question, str, Sets]],
    run: Callable[[Question, str, Sets, float], Found],
    path: Path,
    minutes: float,
    clock: Callable[[], float] = time.monotonic,
) -> tuple[list[Found], dict[str, str]]:
    """(every run that is in the file by now, reasons of those that failed); each is saved as it is
    done, none that is there is made again, and none is begun where the longest so far would not
    end within the minutes."""
    found = read(path)
    had, failed = {(one.question, one.name) for one in found}, dict[str, str]()
    end, longest = clock() + 60 * minutes, 0.0
    for question, name, sets in todo:
        begun = clock()
        if (question.name, name) in had:
            continue
        if begun + longest > end:
            print(f"{minutes:.3g} minutes are over; the same command goes on", flush=True)
            break
        try:
            found.append(run(question, name, sets, end - begun))
        except Refused as reason:
            failed[f"{question.name}, {name}"] = str(reason)
            print(f"{question.name}, {name}: {reason}", flush=True)
            continue
        longest = max(longest, clock() - begun)
        path.write_text(json.dumps([asdict(one) for one in found], indent=1), encoding="utf-8")
        one = found[-1]
        print(f"{one.question}, {one.name}: {one.foretold:.3g} s, {one.measured:.3g} measured"
              f" ({one.off:+.0%}; others kept {one.others:.0f}% busy)", flush=True)  # fmt: skip
    return found, failed


def read(path: Path) -> list[Found]:
    """What a file has."""
    if not path.is_file():
        return []
    said: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
    return [Found(**{**one, "bytes": tuple(one["bytes"])}) for one in said]


# -- what is said of it ----------------------------------------------------------------------------


def choices(found: Sequence[Found]) -> dict[str, float]:
    """By question, by how much the planner's choice is slower than the best that was measured: of
    the two that were run again, where they are there."""
    lost = {}
    for question in dict.fromkeys(one.question for one in found):
        mine = {one.name: one.measured for one in found if one.question == question}
        if PLANNED + AGAIN in mine:
            mine = {n.removesuffix(AGAIN): spent for n, spent in mine.items() if n.endswith(AGAIN)}
        if PLANNED in mine and len(mine) > 1:
            lost[question] = mine[PLANNED] / min(mine.values()) - 1
    return lost


def missed(found: Sequence[Found]) -> list[str]:
    """Targets that these runs miss, each with its figure."""
    said = []
    held = [one.bytes[0] / one.bytes[1] - 1 for one in found]
    if min(held) < 0 or max(held) > MEMORY:
        said.append(f"memory is off by {min(held):+.2%} to {max(held):+.2%}")
    off = [abs(one.off) for one in found]
    if median(off) > MIDDLE or max(off) > WORST:
        said.append(f"seconds are off by {median(off):.1%} at the median, {max(off):.1%} at worst")
    for question, lost in choices(found).items():
        if lost > CHOICE:
            said.append(f"{question}: the choice is {lost:.1%} slower than the best")
    return said


def shown(found: Sequence[Found]) -> str:
    head = ("run", "mesh", "by rates", "foretold", "measured", "off", "memory foretold", "measured",
            "off")  # fmt: skip
    rows = [
        (f"{one.question}: {one.name}", one.plan, f"{one.rates:.3g} s", f"{one.foretold:.3g} s",
         f"{one.measured:.3g} s", f"{one.off:+.1%}", f"{one.bytes[0] / MIB:.1f} MiB",
         f"{one.bytes[1] / MIB:.1f} MiB", f"{one.bytes[0] / one.bytes[1] - 1:+.2%}")
        for one in found
    ]  # fmt: skip
    return markdown(head, rows)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, default=Path("foresight.json"), help="what is done")
    parser.add_argument("--minutes", type=float, default=30.0, help="then it stops; 30")
    parser.add_argument("--only", nargs="+", metavar="QUESTION", help="of these alone")
    return parser.parse_args()


def main() -> int:
    asking = parsed()
    begun = time.monotonic()
    asked = [one for one in QUESTIONS if asking.only is None or one.name in asking.only]
    if not asked:
        raise SystemExit(f"--only: expected among {', '.join(one.name for one in QUESTIONS)}")
    with tempfile.TemporaryDirectory(prefix="outsize-foresight-") as name:
        bench = Bench.made(Path(name))
        end = begun + 60 * asking.minutes
        minutes = (end - time.monotonic()) / 60
        found, failed = made(list(runs(asked)), bench.run, asking.json, minutes)
        minutes = (end - time.monotonic()) / 60
        found, more = made(list(again(asked, found)), bench.run, asking.json, minutes)
    if not found:
        return 1
    print(f"\n{shown(found)}")
    for question, lost in choices(found).items():
        print(f"{question}: the planner's choice takes {lost:+.1%} of the best measured")
    short = missed(found)
    for line in (*short, *(f"failed: {what}: {why}" for what, why in (failed | more).items())):
        print(line)
    if max(one.others for one in found) > QUIET:
        print("THE MACHINE WAS NOT QUIET: times are no result")
    first = sum(not one.name.endswith(AGAIN) for one in found)
    print(f"{first} of {len(list(runs(QUESTIONS)))} runs are done")
    return 1 if short or failed or more else 0


if __name__ == "__main__":
    sys.exit(main())
