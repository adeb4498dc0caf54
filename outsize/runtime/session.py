"""Generation through a decoder that is in no job: the actions of a job that generates, played by an
engine of its own over weights that are in memory, come from files, or lie on the workers of a mesh.

Who has handed on a slice of a long prompt begins with the next one while the others have the first.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from outsize.decode.generate import Draw
from outsize.decode.runs import Run
from outsize.decode.samplers import Drawn
from outsize.memory import Ledger, format_bytes, meter
from outsize.models.decoder import Decoder
from outsize.models.seams import Past
from outsize.plan import Plan, Stage
from outsize.plan.plan import per_segment
from outsize.runtime.engine import Engine, Handler, Hook, Loaded
from outsize.runtime.generating import TokenSteps, kind_of
from outsize.runtime.handlers.links import Links
from outsize.runtime.handlers.passes import Forward, nothing_comes
from outsize.runtime.handlers.sample import Sample, untold
from outsize.runtime.handlers.states import Arrivals
from outsize.runtime.microbatches import Microbatches, nothing_leaves
from outsize.runtime.native import NativeFlow
from outsize.runtime.points import Points
from outsize.runtime.watch import Watch
from outsize.runtime.weights import Resident, Weights
from outsize.schedule import Kind, Schedule, compile_tokens, prove
from outsize.schedule.compile.tokens import sampled

if TYPE_CHECKING:
    from outsize.runtime.stage_links import StageLinks

Lists = Callable[[Kind], Schedule]
RESIDENT = Resident()


@dataclass(frozen=True)
class Peers:
    """The workers that take the same steps, as one of them meets the others. plan: of the mesh;
    draws: whether this one draws the tokens; tell: gives what that one has, on every one;
    stage_links: how activations go on, where the stages lie on several."""

    plan: Plan
    draws: bool = True
    tell: Callable[[Tensor], Tensor] = untold
    stage_links: StageLinks | None = None


class Session:
    """One worker's steps; all workers take the same ones. Called, it takes one, as a TokenStep of
    outsize.decode. Close it, or use it in a `with`, to end its threads.

    weights: what brings those of a stage. lists: the proved list of each kind of step, where it is
    not all stages one after the other, as those of a model in memory. peers: the other workers.
    seconds: of the steps of a request, by kind; peak: most bytes on the device, where `count` has
    been called, in those that a prompt goes through and the first that does not: others are timed.
    """

    def __init__(
        self,
        model: Decoder,
        weights: Weights = RESIDENT,
        lists: Lists | None = None,
        peers: Peers | None = None,
        run: Run | None = None,
    ) -> None:
        count, self.watch = len(model.blocks) + 2, Watch()
        stages = per_segment(count) if run is None else (Stage(0, count),)
        peers = peers or Peers(Plan(count, stages, 1))
        flow, self._stage_links = NativeFlow(model, peers.plan), peers.stage_links
        stage_links = self._stage_links
        microbatches = Microbatches(flow, self.watch, nothing_leaves, sent=stage_links is not None)
        hand = nothing_comes if stage_links is None else stage_links.hand
        sample = Sample(lambda m: microbatches.of(m).loss, peers.draws, peers.tell)
        handlers: list[Handler] = [Forward(microbatches, hand), Arrivals(weights), sample]
        before: list[Hook] = []
        if stage_links is not None:
            links = Links(stage_links, microbatches)
            handlers.append(links)
            before.append(links.sweep)
        self.engine = Engine(handlers, flow.device, self.watch, before, [microbatches.ending])
        each = len(stages)
        uses, made = tuple((s,) for s in range(each)), lists or _alone(each)

        def playable(kind: Kind) -> Loaded:
            return self.engine.load(one := made(kind), Points(one, uses))

        self.seconds: dict[Kind, list[float]] = {}
        self.peak = self._weights = 0
        self._playable, self._sample = playable, sample
        self.steps = TokenSteps(
            flow, self.engine, sample, lambda kind, *_: playable(kind), microbatches.carry
        )
        if run is not None:
            self.steps.run = run
        self.forget()

    def fill(self) -> float:
        """Bring what every list finds in the pool; gives the seconds that it took."""
        begin = time.perf_counter()
        self.engine.play(self._playable(Kind.FETCH), begin)
        return time.perf_counter() - begin

    def __call__(
        self,
        ids_T: Tensor,
        positions_T: Tensor,
        bounds: tuple[int, ...],
        past: Past,
        draws: Sequence[Draw],
    ) -> list[Drawn]:
        kind, begin = kind_of(bounds), time.perf_counter()
        if self.watch.ledger is not None and len(self.seconds[Kind.DECODE]) == 1:
            self.watch.ledger = None
        found = self.steps(ids_T, positions_T, bounds, past, draws)
        self.seconds[kind].append(time.perf_counter() - begin)
        self.peak = max(self.peak, *(self._weights + ran.peak for ran in self.steps.ran))
        return found

    def forget(self) -> None:
        """Another request begins."""
        self.seconds = {Kind.PREFILL: [], Kind.DECODE: []}
        self.peak = self._weights = 0
        self.watch.ledger = None

    def keep(self) -> None:
        """What is drawn, and the logits of all tokens, stay from now on where they are made: with
        the worker that draws."""
        self._sample.tell = untold

    def count(self, beside: int = 0) -> None:
        """Count bytes in the request that begins. beside: of buffers that are there already."""
        parameters = list(self.steps.model.parameters())
        ledger = meter(self.steps.flow.device, own=parameters)
        for parameter in parameters:
            ledger.see(parameter)
        held = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in parameters}
        # An allocator counts all of them, and no buffers of the host.
        count = beside + sum(held.values()) - ledger.total
        self._weights = count if isinstance(ledger, Ledger) else 0
        self.watch.ledger = ledger

    def timing(self, peak: int, prompt: float, token: float) -> str:
        """What the steps of a request took and held, with what was predicted of its peak in bytes
        and the seconds of the prompt and of a token."""
        first, tokens = self.seconds[Kind.PREFILL], self.seconds[Kind.DECODE]
        counting = " with bytes counted" if self.peak else ""
        said = [f"prompt {sum(first):.3g} s{counting}, predicted {prompt:.3g}"] if first else []
        if tokens:
            timed = tokens[1:] if self.peak and len(tokens) > 1 else tokens  # beside what counted
            said.append(f"{sum(timed) / len(timed):.3g} s a token, predicted {token:.3g}")
        if self.peak:
            said.append(f"{format_bytes(self.peak)} at most, predicted {format_bytes(peak)}")
        return "; ".join(said)

    def close(self) -> None:
        """End its threads, once everything has gone; raises what went wrong there."""
        self.engine.close()
        if self._stage_links is not None:
            self._stage_links.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *fault: object) -> None:
        if fault[0] is None:
            self.close()


def _alone(stages: int) -> Lists:
    def made(kind: Kind) -> Schedule:
        schedule = sampled(compile_tokens(stages, kind))
        prove(schedule)
        return schedule

    return made
