"""What is run, part by part, and what of it a machine has no memory or no time for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from support.gpu.shapes import PLANS, Work, parameters

from outsize.memory.sizes import format_bytes

GIB = 1 << 30
# Of the minutes, by part. What a part leaves goes to those behind it.
SHARES = {
    "tests": 0.15,
    "probe": 0.05,
    "plans": 0.15,
    "steps": 0.3,
    "offloaded": 0.2,
    "tokens": 0.15,
}
USABLE = 0.8  # of host memory and disk that are free: the rest is for pages and processes
DEVICE = 24 * GIB  # of a device, for models that are larger than it: what a desktop's has
MASTER, BARE = 18, 8  # bytes of states a parameter, bfloat16: with a float32 master, and alone
HELD = 16  # bytes of states a parameter where float32 weights are trained under autocast
Machine = Mapping[str, Any]


@dataclass(frozen=True)
class Case:
    """A task of child.run. seconds: what it takes at least; needs: bytes by tier, for a machine to
    have; without: why it is not run at all."""

    name: str
    task: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    seconds: float = 5
    needs: Mapping[str, int] = field(default_factory=dict)
    without: str = ""

    def left_out(self, machine: Machine, seconds: float) -> str:
        """Why it cannot be run with so many seconds left, "" where it can."""
        for tier, size in self.needs.items():
            has = int(machine[f"{tier} bytes"])
            if size > has:
                return f"needs {format_bytes(size)} on the {tier}, {format_bytes(has)} are free"
        if self.seconds > seconds:
            return f"takes {self.seconds:.0f} s at least, its part has {max(0, seconds):.0f} s left"
        return self.without


Part = Callable[[Machine, bool], list[Case]]


def tests(machine: Machine, dry: bool) -> list[Case]:
    chosen = {"chosen": "lane" if dry else ""}
    without = "no accelerator" if machine["kind"] == "cpu" else ""
    least = 5 if dry else 30
    return [Case("exactness", "support.gpu.programs:tests", chosen, least, without=without)]


def probe(machine: Machine, dry: bool) -> list[Case]:
    return [Case("probe", "support.gpu.training:probed")]


def plans(machine: Machine, dry: bool) -> list[Case]:
    work = Work("tiny", 4, 64, 1, 1) if dry else Work("350M", 16, 1024, 2, 3)
    tier = GIB >> 6 if dry else 8 * GIB
    needs = {"device": 0 if dry else 20 * GIB}
    told = {"work": asdict(work), "tier": tier}
    task = "support.gpu.offloading:one_plan"
    return [Case(name, task, {"name": name, **told}, 0 if dry else 10, needs) for name in PLANS]


def steps(machine: Machine, dry: bool) -> list[Case]:
    size = {"size": 128 if dry else 8192, "calls": 2 if dry else 10}
    found = [Case("matmul peak", "support.gpu.training:matmul_peak", size)]
    works = [Work("25M", 32, 512, 3, 10), Work("350M", 8, 2048, 3, 10), Work("1.1B", 8, 2048, 3, 6)]
    for work in [Work("tiny", 4, 64, 1, 2)] if dry else works:
        needs = {"device": HELD * parameters(work.shape)}
        least = 0 if dry else 10 + parameters(work.shape) / 1e8
        for name, task, extra in CONTENDERS:
            compiled, without = name == "torch.compile", ""
            if dry and compiled:
                without = "a dry run compiles nothing"
            elif name == "FSDP2" and machine["kind"] == "strict":
                without = "FSDP2 asks for more than the device of the tests has"
            arguments = {"work": asdict(work), **extra}
            found.append(
                Case(f"{work.shape}, {name}", f"support.gpu.training:{task}", arguments,
                     least * (3 if compiled else 1), needs, without)
            )  # fmt: skip
    return found


CONTENDERS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("Outsize", "ours", {}),
    ("plain loop", "plain", {}),
    ("FSDP2", "fsdp2", {}),
    ("torch.compile", "plain", {"compiled": True}),
)


def offloaded(machine: Machine, dry: bool) -> list[Case]:
    if dry:
        work = asdict(Work("tiny", 4, 64, 1, 1))
        told = {"work": work, "host": GIB >> 6, "disk": GIB >> 6}
        task = "support.gpu.offloading:larger"
        return [
            Case(f"tiny, {name}", task, {**told, "master": master, "budget": budget})
            for name, master, budget in (
                ("with a master", True, 3 << 20),
                ("bfloat16 alone", False, 3 << 19),
            )
        ]
    found = []
    for shape, rows in (("7B", 8), ("13B", 8)):
        work = Work(shape, rows, 2048, 1, 2)
        found += [_larger(work, machine), _deepspeed(work)]
    return found


def _larger(work: Work, machine: Machine) -> Case:
    """With a float32 master where the host has room for it; the disk takes what the host cannot."""
    count, host = parameters(work.shape), int(USABLE * machine["host bytes"])
    master = MASTER * count <= host
    below = int(1.05 * (MASTER if master else BARE) * count)
    disk = below - host if below > host else 0
    told = {
        "work": asdict(work), "budget": DEVICE, "host": min(host, below),
        "disk": disk and disk + 4 * GIB, "master": master,
    }  # fmt: skip
    needs = {"device": DEVICE + GIB, "disk": int(told["disk"] / USABLE)}
    least = 40 + min(host, below) / 2e9 + disk / 5e8
    return Case(f"{work.shape}, Outsize", "support.gpu.offloading:larger", told, least, needs)


def _deepspeed(work: Work) -> Case:
    needs = {"device": DEVICE, "host": int(MASTER * parameters(work.shape) / USABLE)}
    told = {"work": asdict(work)}
    return Case(f"{work.shape}, DeepSpeed", "support.gpu.programs:deepspeed", told, 90, needs)


def tokens(machine: Machine, dry: bool) -> list[Case]:
    found, task = list[Case](), "support.gpu.generating"
    # A shape, tokens of its prompt, of an answer in memory and of one that is larger; 0: no files.
    shapes = [("1.1B", 64, 256, 16), ("8B", 64, 128, 0)]
    share = 0.8 if dry else 0.5  # of the weights, what the device may hold
    for shape, prompt, many, few in [("tiny", 16, 4, 4)] if dry else shapes:
        size = 2 * parameters(shape)
        held = {"device": 0 if dry else size + GIB}
        lasts = 0 if dry else 10 + size / 2e9
        told = {"shape": shape, "prompt": prompt, "tokens": many}
        some = {**told, "requests": 2 if dry else 16}
        if few:
            disk = {"disk": int(size / USABLE), "host": 2 * size}
            found.append(
                Case(f"{shape}, written", f"{task}:written", {"shape": shape}, lasts, disk)
            )
        found += [
            Case(f"{shape}, Outsize", f"{task}:ours", told, lasts, held),
            Case(f"{shape}, transformers", f"{task}:theirs", told, lasts, held),
            Case(f"{shape}, Outsize, {some['requests']} at once", f"{task}:together", some, lasts,
                 held),
            Case(f"{shape}, transformers, {some['requests']} at once", f"{task}:theirs", some,
                 lasts, held),
        ]  # fmt: skip
        if few:
            less, longer = {**told, "tokens": few, "share": share}, few * size / 1e9
            found.append(
                Case(f"{shape}, Outsize, {share:.0%} of the weights", f"{task}:ours", less,
                     0 if dry else lasts + longer, held)
            )  # fmt: skip
    return found


PARTS: Mapping[str, Part] = {
    "tests": tests, "probe": probe, "plans": plans, "steps": steps, "offloaded": offloaded,
    "tokens": tokens,
}  # fmt: skip
