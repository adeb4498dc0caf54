"""Generation through a decoder whose parts lie on the workers of a pipeline.

Hidden states go from one worker to the next. The last one has the logits, draws the token and tells
it to the others: logits do not travel, and who has handed on a slice of a long prompt begins with
the next one while the others have the first.

T tokens of a step, D hidden, N sequences, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from outsize.collectives import Collective, World, along, everyone
from outsize.collectives.channel import Receiver, Sender
from outsize.decode.samplers import Sampler
from outsize.models.decoder import Decoder
from outsize.models.seams import Past


class Relay:
    """One worker's part of generation; see outsize.decode.Forward. All workers take the same steps.

    turns: by segment (prologue, blocks, epilogue) the place on the pipeline axis that has it.
    cut: every worker has rows of the embedding and of the head
    (outsize/parallel/piped_vocabulary.py). Close it, or use it in a `with`, to end the threads that
    send.
    """

    def __init__(
        self, model: Decoder, world: World, turns: Sequence[int], cut: bool = False
    ) -> None:
        assert len(turns) == len(model.blocks) + 2, f"{len(turns)} turns"
        self.model, self.turns = model, tuple(turns)
        self._here = world.mesh.index("pipeline", world.rank)
        self._device = next(model.parameters()).device
        self._all = everyone(world)
        self._line = along(world, "pipeline") if cut else None
        self._drawer = world.mesh.ranks("pipeline", 0)[turns[-1]]
        line = world.mesh.ranks("pipeline", world.rank)
        self._senders: dict[int, Sender] = {}
        self._receivers: dict[int, Receiver] = {}
        for source, target in sorted({hop for hop in pairwise(turns) if hop[0] != hop[1]}):
            if self._here in (source, target):  # both make it, and all in one order
                pair = world.group((line[source], line[target]), "stages")
                if self._here == source:
                    self._senders[target] = Sender(pair, self._device, f"relay send {target}")
                else:
                    self._receivers[source] = Receiver(pair, self._device)

    def __call__(
        self, ids_T: Tensor, positions_T: Tensor, bounds: tuple[int, ...], past: Past
    ) -> Tensor:
        """logits_NV where the epilogue is; elsewhere (N, 0), and `drawing` knows the tokens."""
        model, here = self.model, self._here
        ctx = model.context(positions_T, bounds, past=past)
        parts = (model.prologue if self._line is None else model.prologue.enter, *model.blocks)
        x = ids_T if self._line is None else self._line.all_reduce(model.prologue.tokens(ids_T))
        for segment, (turn, after) in enumerate(pairwise(self.turns)):
            if turn == here:
                x = parts[segment](x, ctx)
            if turn == after:
                continue
            alike = (segment, len(ids_T))  # messages of one shape
            if turn == here:
                self._senders[after].send(alike, [x])
            elif after == here:
                (x,) = self._receivers[turn].receive(alike)
        mine, none_N = self.turns[-1] == here, torch.empty(len(bounds) - 1, 0, device=self._device)
        last_N = torch.tensor(bounds[1:], device=self._device) - 1
        h_ND: Tensor = model.epilogue(x[last_N], ctx) if mine else none_N
        if self._line is not None:
            return self._of_rows(h_ND, self._line)
        return model.epilogue.logits(h_ND) if mine else none_N

    def _of_rows(self, h_ND: Tensor, line: Collective) -> Tensor:
        """logits_NV of everybody's rows, of what the last stage gives."""
        epilogue = self.model.epilogue
        if self.turns[-1] != self._here:
            h_ND = epilogue.head.weight.new_empty(len(h_ND), epilogue.head.weight.shape[1])
        own_NV: Tensor = epilogue.logits(line.broadcast(h_ND.contiguous(), self.turns[-1]))
        assert epilogue.vocabulary is not None, "rows of a vocabulary know who has the others"
        count = len(h_ND)
        every_VN = own_NV.new_empty(epilogue.vocabulary.size, count)
        spans = [(first * count, last * count) for first, last in epilogue.vocabulary.spans]
        line.all_gather(own_NV.t().contiguous().view(-1), spans, every_VN.view(-1))
        return every_VN.t()

    def drawing(self, sampler: Sampler) -> Sampler:
        """The tokens that `sampler` draws where the logits are, on every worker."""

        def draw(logits_V: Tensor, index: int) -> int:
            token = sampler(logits_V, index) if logits_V.numel() else 0
            told = torch.tensor([token], dtype=torch.int64, device=self._device)
            return int(self._all.broadcast(told, self._drawer))

        return draw

    def close(self) -> None:
        """End the threads that send, once everything has gone; raises what went wrong there."""
        for sender in self._senders.values():
            sender.close()

    def __enter__(self) -> Relay:
        return self

    def __exit__(self, *fault: object) -> None:
        if fault[0] is None:
            self.close()
