"""How a plan is spread over workers: states over its data axis, stages over its pipeline axis."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outsize.collectives.mesh import Mesh
from outsize.errors import OutsizeError, expect

KINDS = ("parameters", "gradients", "optimizer")
VOCABULARY = "vocabulary"
AUTO = "auto"  # orders of its own, which the planner finds
BEHIND = (f"+{VOCABULARY}:1", f"+{VOCABULARY}:2")  # what may stand behind a schedule's name


@dataclass(frozen=True)
class Sharding:
    """Over how many neighbours of the data axis each state is cut; 1: every worker has all of it.

    Each divides the next, so that what a worker updates lies within the parameters that it holds.
    On N workers ZeRO's stages 1, 2 and 3 are (1, 1, N), (1, N, N) and (N, N, N); with H of them on
    a machine (H, H, H) is hybrid sharding and (H, N, N) parameters that are gathered within a
    machine only (what ZeRO++'s second copy is for). optimizer: the master copy and the moments.
    """

    parameters: int = 1
    gradients: int = 1
    optimizer: int = 1

    def check(self, data: int) -> None:
        """Refuse degrees that `data` workers cannot have."""
        inner = 1
        for name in (*KINDS, "data"):
            degree = data if name == "data" else int(getattr(self, name))
            if degree < inner or degree % inner:
                what = f"mesh.data is {data}" if name == "data" else f"shards.{name} is {degree}"
                raise OutsizeError(
                    f"plan: {what}; expected a multiple of {inner}, over which the states before it"
                    " are cut (parameters, gradients, optimizer, then all workers of the data axis)"
                )
            inner = degree


@dataclass(frozen=True)
class Pipelined:
    """How the pipeline axis plays a step.

    schedule: a name of outsize/schedule/pipelines, with its number behind a colon where
    it takes one: "interleaved:2" stages a worker, "hanayo:2" waves. cuts: the plan's stages at
    which the second and further stages of the pipeline begin; (): as many in each as can be. costs:
    seconds of a unit's forward, input gradient and weight gradient, for schedules that ask.
    vocabulary: 0, the embedding and the head are where the first and the last stage are; 1 or 2,
    they are cut over all workers, whom a microbatch's backward then waits for twice or once (the
    variants of Yeung et al., "Balancing Pipeline Parallelism with Vocabulary Parallelism", 2024).
    head: then seconds of the whole head's forward, input gradient and weight gradient. orders: of
    the schedule "auto", what each worker computes, as a row of PyTorch's pipelining CSV.
    """

    schedule: str = "1f1b"
    cuts: tuple[int, ...] = ()
    costs: tuple[float, float, float] = (1.0, 1.0, 1.0)
    vocabulary: int = 0
    head: tuple[float, float, float] = (1.0, 1.0, 1.0)
    orders: tuple[str, ...] = ()

    @property
    def ends(self) -> tuple[str, int] | None:
        """How the ends of a microbatch's path are cut over the workers, where they are: a name of
        outsize/schedule/ends.py, and its variant."""
        return (VOCABULARY, self.vocabulary) if self.vocabulary else None

    @property
    def said(self) -> str:
        """Schedule and vocabulary as people write them: `pipelined` reads it."""
        behind = f"+{VOCABULARY}:{self.vocabulary}" if self.vocabulary else ""
        return f"{self.schedule}{behind}"

    @property
    def cutting(self) -> Pipelined:
        """What is left of it where a worker has all stages: what it cuts inside of them."""
        return Pipelined(vocabulary=self.vocabulary)

    def __post_init__(self) -> None:
        rising = list(self.cuts) == sorted(set(self.cuts)) and all(cut >= 1 for cut in self.cuts)
        numbers = "rising numbers from 1 on: a stage without blocks cannot run"
        expect(rising, "plan: pipeline.cuts", list(self.cuts), numbers)
        for name, costs in (("costs", self.costs), ("head", self.head)):
            positive = all(0 < cost < float("inf") for cost in costs)
            expect(positive, f"plan: pipeline.{name}", list(costs), "positive seconds")
        known = "0 (whole layers), 1 (cut over the workers, two barriers) or 2 (one barrier)"
        expect(self.vocabulary in (0, 1, 2), "plan: pipeline.vocabulary", self.vocabulary, known)
        fits = not self.orders or self.schedule == AUTO
        expect(fits, "plan: pipeline.orders of the schedule", self.schedule, f"none, or {AUTO!r}")


def may_rest_below(state: str, shards: Sharding, mesh: Mesh) -> bool:
    """Whether parameters or gradients can rest below the device: those of a worker alone, and its
    share of what workers cut, where it updates all that it has of it."""
    if state == "parameters":
        return shards.parameters == shards.optimizer
    return not mesh.summed or shards.gradients == shards.optimizer > 1


def pipelined(text: str) -> Pipelined:
    """A pipeline as people write it: a schedule, and behind a plus whether the vocabulary is cut:
    "zb-h1", "1f1b+vocabulary:2". OutsizeError says what cannot be read."""
    schedule, plus, more = text.partition("+")
    if not plus:
        return Pipelined(schedule)
    variants = {said: number for number, said in enumerate(BEHIND, start=1)}
    name, _, number = more.partition(":")
    said = f"+{name.strip()}:{number.strip()}"
    if said not in variants:
        raise OutsizeError(
            f"{text!r}: expected a schedule, or one with {' or '.join(BEHIND)} behind it, as"
            f" {schedule.strip() or '1f1b'}{BEHIND[-1]}"
        )
    return Pipelined(schedule.strip(), vocabulary=variants[said])


def share(count: int, parts: int, place: int) -> tuple[int, int]:
    """[start, stop) of the part at a place, of so many parts of `count` things: as equal as can be,
    the first ones the largest."""
    each, more = divmod(count, parts)
    start = place * each + min(place, more)
    return start, start + each + (place < more)


def sharding(said: int | Sequence[int], data: int, name: str) -> Sharding:
    """How a data axis of so many workers cuts states, as people say it: ZeRO's stage, or three
    numbers. name: of what said it."""
    if isinstance(said, int):
        return zero(said, data)
    if len(said) != 3 or min(said) < 1:
        raise OutsizeError(
            f"{name} is {list(said)}; expected 0 to 3, or three numbers from 1 on: over how many"
            " workers weights, gradients, optimizer states are cut, as [1, 1, 2]"
        )
    return Sharding(*said)


def zero(stage: int, data: int) -> Sharding:
    """ZeRO's stages 0 (nothing is cut) to 3 (everything is) on `data` workers."""
    if not 0 <= stage <= 3:
        raise OutsizeError(f"zero is {stage}; expected 0, 1, 2 or 3")
    return Sharding(*(data if stage >= least else 1 for least in (3, 2, 1)))
