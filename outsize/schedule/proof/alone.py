"""One worker's list, played without computing: every input must have been produced, once, before it
is used; every gradient must enter the update exactly once; nothing may be left over. What comes
from other workers is taken for granted here: together.py plays all lists at once.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from outsize.schedule.action import WHOLE, Action, Kind, State, Way
from outsize.schedule.proof.ends import EndsProof
from outsize.schedule.proof.holding import Holding
from outsize.schedule.residency import MOVES, Residency
from outsize.schedule.schedule import Schedule

_SERVING = (Kind.PREFILL, Kind.DECODE)
_TRAINING = (
    Kind.FORWARD, Kind.LOSS, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.NORM, Kind.UPDATE,
)  # fmt: skip
_PASSES = (Kind.SEND, Kind.RECV)


@dataclass
class Alone:
    """What has been produced so far. live: bytes of the device tier that are there throughout."""

    schedule: Schedule
    live: int
    peak: int = 0
    done: set[tuple[Kind, State, int, int, int]] = field(default_factory=set)
    _ways: dict[Way, set[tuple[int, int]]] = field(default_factory=lambda: defaultdict(set))
    unused: set[tuple[State, int, int]] = field(default_factory=set)  # received so far
    _taken: set[int] = field(default_factory=set)  # microbatches of which something has been done

    def __post_init__(self) -> None:
        schedule = self.schedule
        own = tuple((s,) for s in range(schedule.stages))
        every = ((s, m) for s in range(schedule.stages) for m in range(schedule.microbatches))
        self.plays = frozenset(every) if schedule.role is None else schedule.role.plays
        self.residency = schedule.residency or Residency(own)
        self.holding = Holding(self.residency, schedule.first)
        self.ends = None if schedule.ends is None else EndsProof(schedule, schedule.ends)

    def step(self, action: Action) -> str:
        """Play one action; gives the reason why it cannot run, or nothing."""
        if action.kind in MOVES:
            self._count(action)
            return self.holding.step(action)
        if action.key in self.done:
            return "runs a second time"
        reason = self._uncopied(action)
        if self.ends is not None:
            reason = reason or self.ends.step(action)
        if action.kind in _PASSES:
            reason = reason or ("" if action.part != WHOLE else self._passes(action))
        elif action.kind is not Kind.EXCHANGE:
            reason = reason or self._needs(action) or self.holding.step(action)
        self.done.add(action.key)
        self._ways[action.kind.way].add((action.stage, action.microbatch))
        self._count(action)
        return reason

    def _uncopied(self, action: Action) -> str:
        """Why the rows of an action's microbatch are not where they are used, or nothing."""
        m = action.microbatch
        if not self.schedule.copies or m == WHOLE or action.kind is Kind.COPY:
            return ""
        self._taken.add(m)
        return "" if self._has(Kind.COPY, WHOLE, m) else "comes before COPY of its microbatch"

    def _count(self, action: Action) -> None:
        """Bytes of the device tier."""
        self.peak = max(self.peak, self.live + action.workspace)
        if action.allocates:
            self.live += sum(n for where, n in action.allocates if where.startswith("device/"))
            self.peak = max(self.peak, self.live)

    def _has(self, kind: Kind, stage: int, microbatch: int = WHOLE) -> bool:
        return (kind, State.NONE, stage, microbatch, WHOLE) in self.done

    def _normed(self, stage: int) -> bool:
        """Whether the gradients of a stage's group have been summed."""
        return self._has(Kind.NORM, self.schedule.norm(stage))

    def _went(self, stage: int, microbatch: int) -> bool:
        return (stage, microbatch) in self._ways["forward"]

    def _back(self, stage: int, microbatch: int) -> bool:
        return (stage, microbatch) in self._ways["back"]

    def _needs(self, action: Action) -> str:
        kind, s, m = action.kind, action.stage, action.microbatch
        if kind.way == "forward":
            b = self.schedule.before(s, m)
            if b >= 0 and not (self._went(b, m) or self._had(State.ACTIVATIONS, b, m)):
                return f"its input, the output of stage {b}, was not produced"
            earlier = m - self.schedule.again
            if 0 <= earlier < m and not self._has(Kind.SAMPLE, WHOLE, earlier):
                return f"comes before SAMPLE of microbatch {earlier}, whose rows it has"
            if self._normed(s):
                return "comes after NORM, which has summed the gradients already"
            if s in self.schedule.ahead and not self._has(Kind.UPDATE, s):
                return f"comes before UPDATE of stage {s}, which is updated ahead of it"
        elif kind is Kind.RECOMPUTE:
            if s not in self.schedule.recompute or not self._went(s, m):
                return "has no kept input: its stage did not run FORWARD with recompute"
        elif kind.way == "back":
            return self._needs_backward(s, m)
        elif kind is Kind.BACKWARD_WEIGHT:
            if not self._has(Kind.BACKWARD_INPUT, s, m):
                return "comes before its BACKWARD_INPUT"
            if self._normed(s):
                return "comes after NORM, which has summed the gradients already"
        elif kind is Kind.SAMPLE:
            return self._unasked(m)
        elif kind is Kind.NORM:
            return self._gradients_missing(s)
        elif kind is Kind.UPDATE and s in self.schedule.ahead:
            return ""
        elif kind is Kind.UPDATE and self.schedule.behind:
            return self._incomplete(s)
        elif kind is Kind.UPDATE and not self._normed(s):
            return "comes before NORM"
        return ""

    def _incomplete(self, stage: int) -> str:
        """Which gradient a stage's parameters still lack."""
        for s in range(self.schedule.first, self.schedule.stages):
            if stage in self.residency.uses[s]:
                reason = self._gradient_missing(s)
                if reason:
                    return reason
        return ""

    def _needs_backward(self, s: int, m: int) -> str:
        if self._normed(s):
            return "comes after NORM, which has summed the gradients already"
        if self._back(s, m):
            return "its gradient was produced already"
        if not self._went(s, m):
            return "comes before its FORWARD"
        if s in self.schedule.recompute and not self._has(Kind.RECOMPUTE, s, m):
            return "its activations were not computed again"
        after = self.schedule.after(s, m)
        ends = after < 0 or after in self.schedule.cuts
        if not ends and not (self._back(after, m) or self._had(State.GRADIENTS, s, m)):
            return f"its gradient from stage {after} was not produced"
        return ""

    def _had(self, state: State, stage: int, microbatch: int) -> bool:
        """Whether a tensor has come from another worker; it is used now."""
        self.unused.discard((state, stage, microbatch))
        return (Kind.RECV, state, stage, microbatch, WHOLE) in self.done

    def _passes(self, action: Action) -> str:
        """Why a tensor cannot be sent or received here, or nothing."""
        s, m, ahead = action.stage, action.microbatch, action.state is State.ACTIVATIONS
        after = self.schedule.after(s, m)
        maker, user = (s, after) if ahead else (after, s)
        mine, other = (maker, user) if action.kind is Kind.SEND else (user, maker)
        if (other, m) in self.plays:
            return "both of its ends are on this worker"
        if (mine, m) not in self.plays:
            sends = action.kind is Kind.SEND
            return "what it sends is made elsewhere" if sends else "nobody uses it here"
        if not ahead and s < self.schedule.first:
            return f"stage {s} is frozen and has no use for it"
        if action.kind is Kind.RECV:
            self.unused.add((action.state, s, m))
        elif not (self._went(s, m) if ahead else self._back(after, m)):
            return "what it sends was not produced"
        return ""

    def _unsent(self) -> str:
        """Which tensor that another worker waits for was not sent."""
        for s, m in sorted(self.plays):
            before, after = self.schedule.before(s, m), self.schedule.after(s, m)
            ahead = after >= 0 and (after, m) not in self.plays
            if ahead and (Kind.SEND, State.ACTIVATIONS, s, m, WHOLE) not in self.done:
                return f"SEND of activations {s} {m} is missing"
            wanted = before >= self.schedule.first and (before, m) not in self.plays
            back = wanted and self._back(s, m)
            if back and (Kind.SEND, State.GRADIENTS, before, m, WHOLE) not in self.done:
                return f"SEND of gradients {before} {m} is missing"
        for state, s, m in sorted(self.unused):
            return f"nobody has used {state.value} {s} {m}, which were received"
        return ""

    def _gradients_missing(self, group: int) -> str:
        """Why there cannot be the NORM of a group, or of the whole step."""
        for s in range(self.schedule.first, self.schedule.stages):
            if self.schedule.norm(s) == group and (reason := self._gradient_missing(s)):
                return reason
            if s < group and not self._has(Kind.UPDATE, s):
                return f"comes before UPDATE of stage {s}, of a group before it"
        return ""

    def _gradient_missing(self, s: int) -> str:
        for m in range(self.schedule.microbatches):
            if (s, m) not in self.plays:
                continue
            if not self._back(s, m):
                return f"the gradient of stage {s}, microbatch {m} was not produced"
            split = self._has(Kind.BACKWARD_INPUT, s, m)
            if split and not self._has(Kind.BACKWARD_WEIGHT, s, m):
                return f"the weight gradient of stage {s}, microbatch {m} was not produced"
        return ""

    def finish(self) -> str:
        """What a whole step still lacks."""
        kinds = {kind for kind, *_ in self.done}
        if not kinds:
            return "it holds no action"
        copied = {m for kind, _, _, m, _ in self.done if kind is Kind.COPY}
        for m in sorted(copied - self._taken):
            return f"nobody has used microbatch {m}, which was copied"
        if kinds & set(_SERVING):
            return self._tokens_missing(kinds)
        if not self._normed(last := self.schedule.stages - 1):
            if self.schedule.first == self.schedule.stages:  # no backward pass: an evaluation
                return self._passes_missing()
            return self._gradients_missing(self.schedule.norm(last)) or "NORM is missing"
        for s in range(self.schedule.first, self.schedule.stages):
            if self.schedule.role is not None and s not in self.schedule.role.holds:
                continue
            parts = self.residency.parts.get(s, 0)
            for part in range(parts) if parts else (WHOLE,):
                if (Kind.UPDATE, State.NONE, s, WHOLE, part) not in self.done:
                    return f"UPDATE of stage {s} is missing"
        return self._unsent() or next(self.holding.left(), "")

    def _passes_missing(self) -> str:
        """What of a list without backward passes is not there."""
        reason = "" if self.ends is None else self.ends.left()
        for s, m in sorted(self.plays):
            if not self._went(s, m):
                reason = reason or f"stage {s} of microbatch {m} is missing"
        return reason or self._unsent() or next(self.holding.left(), "")

    def _tokens_missing(self, kinds: set[Kind]) -> str:
        serving = kinds.intersection(_SERVING)
        if len(serving) > 1 or kinds.intersection(_TRAINING):
            return f"{' and '.join(sorted(kinds))} are in one schedule; expected one of them alone"
        return self._passes_missing()

    def _unasked(self, microbatch: int) -> str:
        """Why there is nothing to sample from, where the last stage is here."""
        last = (self.schedule.stages - 1, microbatch)
        missing = last in self.plays and not self._went(*last)
        return "comes before the last stage's logits" if missing else ""
