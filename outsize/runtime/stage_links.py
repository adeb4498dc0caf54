"""StageLinks: a worker's activations and their gradients to and from those that have the stages
next to its own (outsize/collectives/channel.py)."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from outsize.collectives import World
from outsize.collectives.channel import Form, MessageKey, Receiver, Sender
from outsize.collectives.courier import Flight
from outsize.runtime.flow import Walk
from outsize.runtime.rows import Rows
from outsize.schedule import Action, Kind, State
from outsize.schedule.action import WHOLE
from outsize.schedule.chunks import Chunks
from outsize.schedule.pipelined import Pipelining, channels, peer

_Name = tuple[State, int, int, int]


class StageLinks:
    """Of one worker. account: the ledger's way to say which kind a tensor is. rows: those that are
    here of layers that all share, which take and give what comes and goes in parts."""

    def __init__(
        self,
        world: World,
        chunks: Chunks,
        device: torch.device,
        account: Callable[[str], AbstractContextManager[None]],
        rows: Rows | None = None,
    ) -> None:
        self._device, self._account, self._rows = device, account, rows
        self.turn, line = chunks.turn, chunks.pipelining
        assert line is not None
        self.line: Pipelining = line
        ranks = world.mesh.ranks("pipeline", world.rank)
        self._senders: dict[int, Sender] = {}
        self._receivers: dict[int, Receiver] = {}
        for source, target in channels(line):  # in one order everywhere: groups are made by both
            if self.turn in (source, target):
                pair = world.group((ranks[source], ranks[target]), "stages")
                if self.turn == source:
                    self._senders[target] = Sender(pair, device, f"lane send {target}")
                else:
                    self._receivers[source] = Receiver(pair, device)
        self.evaluating = self._rehearsed = False
        self.reset()

    def reset(self) -> None:
        """Forget the step."""
        self._leaving: list[tuple[Flight, Sequence[Tensor]]] = []
        self._made: dict[_Name, Sequence[Tensor] | None] = {}  # where something will come to
        self._here: dict[_Name, list[Tensor]] = {}
        self._gone: dict[_Name, Flight] = {}
        self._forms: dict[tuple[int, int], tuple[Form, ...]] = {}  # of what has come

    def leave(self, move: Action, walk: Walk, shapes: Hashable) -> Flight:
        """Send what a walk has for another worker; in the calling thread. Gives what is over once
        it has gone. Waits where too much is under way."""
        self.sweep()
        ahead = move.state is State.ACTIVATIONS
        if move.part != WHOLE:
            assert self._rows is not None
            tensors = [self._rows.given(move.state, move.microbatch)]
        elif ahead:
            tensors = walk.take(move.stage)
        else:
            forms = self._forms.pop((move.stage, move.microbatch))
            kinds = [form for form in forms if form.dtype.is_floating_point]
            found = zip(walk.take_gradient(move.stage), kinds, strict=True)
            tensors = [_zeros(f, self._device) if g is None else g for g, f in found]
        sender = self._senders[peer(self.line, move, self.evaluating)]
        gone = sender.send((*_key(move), shapes), tensors)
        self._leaving.append((gone, tensors))
        return gone

    def sweep(self) -> None:
        """Let what has gone go."""
        self._leaving = [each for each in self._leaving if not each[0].over]

    def expect(self, move: Action, shapes: Hashable) -> None:
        """Make room for what will come; in the calling thread."""
        receiver = self._receivers[peer(self.line, move, self.evaluating)]
        if self._rehearsed:
            self._foretell(receiver, move, shapes)
        forms = receiver.forms((*_key(move), shapes))
        with self._account("activations"):
            room = None if forms is None else [form.empty(self._device) for form in forms]
        self._made[_name(move)] = room

    def come(self, move: Action, shapes: Hashable) -> None:
        """Have what another worker sends; in the lane's thread."""
        receiver, name = self._receivers[peer(self.line, move, self.evaluating)], _name(move)
        key = (*_key(move), shapes)
        came = receiver.receive(key, self._made.pop(name))
        if move.part != WHOLE:
            assert self._rows is not None
            self._rows.give(move.state, move.microbatch, came[0])
            return
        self._here[name] = came
        if move.state is State.ACTIVATIONS:
            forms = receiver.forms(key)
            assert forms is not None
            self._forms[move.stage, move.microbatch] = forms

    def hand(self, action: Action, walk: Walk) -> None:
        """Give a walk what an action computes with, where it has come from another worker."""
        s, m = action.stage, action.microbatch
        before = s - 1 if self.evaluating else self.line.before(s, m)
        ahead, back = (State.ACTIVATIONS, before, m, WHOLE), (State.GRADIENTS, s, m, WHOLE)
        if action.kind.way == "forward" and ahead in self._here:
            walk.put(before, self._here.pop(ahead))
        elif action.kind.way == "back" and back in self._here:
            walk.put_gradient(s, list(self._here.pop(back)))

    def prepare(self, move: Action, of: Callable[[int], Walk], shapes: Hashable) -> None:
        """The part of a SEND or RECV that is the calling thread's. of: a microbatch's walk, which
        has begun where something of it is sent."""
        if move.kind is Kind.RECV:
            self.expect(move, shapes)
        else:
            self._gone[_name(move)] = self.leave(move, of(move.microbatch), shapes)

    def move(self, move: Action, shapes: Hashable) -> None:
        """The part that is its lane's; raises what went wrong with what was sent."""
        if move.kind is Kind.RECV:
            self.come(move, shapes)
            return
        self._gone.pop(_name(move)).wait()
        for sender in self._senders.values():
            sender.check()

    @property
    def forms(self) -> dict[MessageKey, tuple[Form, ...]]:
        """What this worker has sent is like, by key."""
        return {key: forms for one in self._senders.values() for key, forms in one.known.items()}

    def told(self, forms: Mapping[MessageKey, tuple[Form, ...]]) -> None:
        """What will come is like: of a rehearsal, to which nothing comes."""
        self._rehearsed = True
        for receiver in self._receivers.values():
            receiver.known.update(forms)

    def _foretell(self, receiver: Receiver, move: Action, shapes: Hashable) -> None:
        """Of what no worker before this one has sent: a gradient is like what left for it, and a
        block's output like another's."""
        sent = {(*key, of): forms for (*key, of), forms in self.forms.items() if of == shapes}
        ahead = (State.ACTIVATIONS, *_key(move)[1:], shapes)
        like = sent.get(ahead) or next(iter(sent.values()), None)
        if like is not None:
            back = move.state is State.GRADIENTS
            kinds = tuple(form for form in like if form.dtype.is_floating_point or not back)
            receiver.known.setdefault((*_key(move), shapes), kinds)

    def size(self, move: Action) -> int:
        """Bytes of what a SEND or RECV moves, once one like it was there."""
        known = dict(self.forms)
        for receiver in self._receivers.values():
            known |= receiver.known
        like = (forms for (*key, _), forms in known.items() if tuple(key) == _key(move))
        return sum(form.nbytes for form in next(like, ()))

    def close(self) -> None:
        """End the threads that send, once everything has gone."""
        for sender in self._senders.values():
            sender.close()


def _name(move: Action) -> _Name:
    return move.state, move.stage, move.microbatch, move.part


def _key(move: Action) -> tuple[State, int, int]:
    """What messages that are like one another have in common."""
    return move.state, move.stage, move.part


def _zeros(form: Form, device: torch.device) -> Tensor:
    return torch.zeros(form.shape, dtype=form.dtype, device=device)
