"""What the processes of benchmarks/decode_cpu.py share: the task, and the times that count.

Needs nothing but Python, so that a peer's environment needs nothing of Outsize.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

TASK, FOUND = "task.json", "found.json"
Prompts = Sequence[Sequence[int]]
Generate = Callable[[Prompts, int], list[list[int]]]


@dataclass(frozen=True)
class Task:
    """weights: a Hugging Face directory; gguf: the same weights, in the format, as a GGUF file;
    format: float32, int8 or int4; eights: whether what is multiplied by codes may be rounded to 8
    bits; prompts: token ids of each request; new: tokens to add; again:
    how often it is timed, of which the best counts."""

    weights: str
    gguf: str
    format: str
    prompts: list[list[int]]
    new: int
    threads: int
    again: int
    eights: bool = False


@dataclass(frozen=True)
class Found:
    """first, whole: seconds until every request had one token, and all of them; tokens: those of
    the first request; ready: seconds from the process's start to its first token; peak: most bytes
    of the process that were resident."""

    first: float
    whole: float
    tokens: list[int]
    ready: float
    peak: int


def resident() -> int:
    """VmHWM: what a parent had before it became this program does not count."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    (line,) = [one for one in lines if one.startswith("VmHWM:")]
    return int(line.split()[1]) * 1024


def measure(make: Callable[[Task], Generate]) -> None:
    """Time what `make` gives, and write what is found into the task's folder. Prompts differ each
    time in their first token, so that nothing kept of an earlier one helps."""
    begun = time.perf_counter()
    folder = Path(sys.argv[1])
    task = Task(**json.loads((folder / TASK).read_text(encoding="utf-8")))
    generate = make(task)
    generate(task.prompts[:1], 1)
    ready = time.perf_counter() - begun
    firsts, wholes, tokens = list[float](), list[float](), list[int]()
    for turn in range(task.again):
        for count, found in ((1, firsts), (task.new, wholes)):
            mark = 10 + 2 * turn + (count > 1)
            asked = [[mark, *ids[1:]] for ids in task.prompts]
            start = time.perf_counter()
            made = generate(asked, count)
            found.append(time.perf_counter() - start)
            assert all(len(one) == count for one in made), [len(one) for one in made]
        tokens = made[0]
    found_all = Found(min(firsts), min(wholes), tokens, ready, resident())
    (folder / FOUND).write_text(json.dumps(asdict(found_all)), encoding="utf-8")
