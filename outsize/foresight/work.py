"""What one worker of a stage does for a microbatch, as seconds of lanes at the rates of a source.

T tokens of a microbatch on one worker, H hidden size, t workers of the tensor axis. Everything is
counted from matrices and operators of the shape (outsize/foresight/shape.py); nothing is measured.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from outsize.foresight.layout import Layout, stored
from outsize.foresight.links import Operation, Ranks, exchange, ranks, seconds
from outsize.foresight.network import Network
from outsize.foresight.shape import Shape
from outsize.foresight.sources import KERNELS as KERNELS_FUSED
from outsize.foresight.sources import CostSource
from outsize.hardware.cluster import Group

# Bytes that elementwise chains read and write of a token, in halves of H: two norms and two sums
# into the stream, each with a kernel of its own, forward (counted from Megatron-LM's kernels).
STREAM = 10.0
TURNED, PLAIN = 3.0, 1.0  # of queries and keys: biases, rotations, transposes; without any
# The same where every operator has a kernel of its own: LayerNorm and GELU are one kernel each in
# PyTorch, RMSNorm and rotations are chains in float32, a gate is two kernels. LLaMA's RMSNorm
# widens (3), squares (4), takes the mean (2), scales (4), narrows (3) and weighs (2); a sum has 3.
CHAIN, ROTATED, GATED = 42.0, 14.0, 5.0
BACK = 2.0  # times the forward's: it reads what was kept and the gradient
DROPPED = 1.5  # halves of H: masks of dropout
# Bytes of a score of unfused attention, forward and back: written by the product, masked,
# normalised, dropped out, read by the next product.
SCORES = {"fused": (13.0, 17.0), "plain": (24.0, 28.0)}
# Bytes of an element of a head's output for each other part of a sequence whose keys come: forward,
# widened to 32 bits (6) and added by three kernels (12, 8, 12), of half of the parts to half of the
# rows (27 with their halves joined), keys and values joined to be sent (8); back, three gradients
# added up in 32 bits (10 each), two of them and keys and values joined (24). PyTorch 2.6,
# distributed/tensor/experimental/_attention.py.
MERGED = (40.0, 54.0)
ALIGNED = 8  # a head's size of other multiples has no tensor cores (NVIDIA, the same guide)
SCALAR = 4.0  # times as long on the cores that remain, beyond lines that are not whole
LOGITS = (4.0, 4.0)  # bytes of a logit: read twice, its gradient written over it and read
LAUNCH = 12e-6  # seconds of the processor for a call with its module's code and autograd's graph
BLOCKED = 40e-6  # of a kernel that the processor waits for: the call, its end, a thread that wakes
KERNELS = 17  # of a layer's forward, fused
ROUTED = 60  # of a layer's experts: routing, sorting, exchanging
OWN = (
    14  # of a layer's forward on a processor, whose kernels are ours; a rehearsal counts 42 in all
)
OF_EXPERT = 3  # of each expert that is here: two products, a gate; as many again that cast for them
MOVED = 8.0  # halves of H of a token and expert: sorted, gathered, weighted, summed
# A recurrent state (the kernels of Dao and Gu's Mamba-2): tokens of a piece; halves of its inner
# size beside the convolution that its kernels read and write of a token (values three times, the
# result, the gate, the norm); of a state (float32: written, carried on, read).
PIECE, SCANNED, CARRIED = 128, 9.0, 8.0
PADDED = 512  # multiples of a vocabulary (Megatron-LM: 128 for each worker of the tensor axis)
CAST = 5.0  # bytes of an element that enters a product in 8 bits or fewer: read, written twice


Lanes = defaultdict[str, float]


@dataclass(frozen=True)
class Work:
    """A model on the workers of a layout: seconds of the lanes of its parts, by a source's rates.

    Lanes: matmul (in 16 bits or more), narrow (8 bits or fewer), attention, scan (recurrent
    states), traffic, launch (beside the device) or called (a processor's calls, by itself);
    tensor, exchange: collectives of weights that are cut and of experts; ring: keys and values of
    other parts of a sequence.
    """

    shape: Shape
    layout: Layout
    source: CostSource
    machines: Group
    network: Network | None = None  # as measured between nodes, where it was

    # -- parts -------------------------------------------------------------------------------------

    @cached_property
    def layer(self) -> Lanes:
        """An average layer of a microbatch, forward and back, with what is computed again."""
        s, found, wide = self.shape, lanes(), self.layout.wide / self.shape.layers
        if wide and self.layout.narrow:
            add(found, replace(self, layout=replace(self.layout, wide=0)).layer, 1 - wide)
            add(found, replace(self, layout=replace(self.layout, precision="bf16")).layer, wide)
            return found
        for count, part in (
            (s.parts.attending, self._attention),
            (s.parts.recurring, self._recurrence),
            (s.parts.plain, lambda: self._mlp(s.d_inner, self.layout.tokens, 1)),
            (s.parts.routed, self._experts),
        ):
            if count:
                add(found, part(), count / s.layers)
        add(found, self._stream(), s.parts.halves)
        return found

    @cached_property
    def head(self) -> Lanes:
        """The last layer with its loss, forward and back, or a stage's part of it; always in 16
        bits."""
        cut = self.layout.tensor if self.layout.stack.vocabulary_cut else 1
        over = self.layout.vocabulary_over
        tokens, rows = self.layout.tokens, padded(self.shape.vocab) / cut / over
        found = lanes()
        for m, n, k in _three(tokens, rows, self.shape.hidden):
            found["matmul"] += self.source.product(m, n, k, self._wide).seconds
        whole = rows if self.layout.stack.logits_cut else self.shape.vocab / over
        found["traffic"] = self.source.traffic(sum(LOGITS) * tokens * whole).seconds
        return found

    @cached_property
    def recomputed(self) -> Work:
        """The same with every layer computed again."""
        return replace(self, layout=replace(self.layout, recompute="full"))

    @cached_property
    def tensor(self) -> Ranks:
        return self.ranks(self.layout.tensor, 1)

    def ranks(self, size: int, stride: int) -> Ranks:
        """A group on these machines."""
        return ranks(size, stride, self.machines.node, self.network)

    @staticmethod
    def none() -> Lanes:
        """Lanes without anything."""
        return lanes()

    @property
    def sent(self) -> float:
        """Bytes of a microbatch that go from a stage to the next."""
        if self.shape.module is not None:
            return self.shape.module.sent(self.layout)
        each = self.layout.tokens * self.shape.hidden * stored(self.layout)
        parted = self.layout.stack.scattered or self.layout.sequence_parallel
        return each / self.layout.tensor if parted else each

    @property
    def _wide(self) -> str:
        return "bf16" if self.layout.narrow else self.layout.precision

    # -- attention ---------------------------------------------------------------------------------

    def _attention(self) -> Lanes:
        """Its matrices, and its scores."""
        tokens = self.layout.tokens
        found = self._matrices(self.shape.attention, tokens)
        add(found, self._scores())
        if self.layout.context > 1:
            s, mine, merged = self.shape, self.layout.tokens, self.layout.stack.merged
            groups = s.heads if merged else s.n_groups
            kept = 2 * groups * s.d_head * 2 * mine / self.layout.tensor
            group = self.ranks(self.layout.context, self.layout.tensor)
            one = seconds("gather", kept * self.layout.context, group, self.machines)
            again = self.layout.recompute == "full"
            # Keys and values forward and back, and their gradients, which may be in 32 bits.
            found["ring"] += (3 + again + merged) * one
            if merged:
                moved = sum(MERGED) + again * MERGED[0]
                moved *= (self.layout.context - 1) * s.heads * s.d_head * mine
                found["traffic"] += self.source.traffic(moved / self.layout.tensor).seconds
        return found

    def _kernel(self) -> str:
        """Megatron's fused softmax takes four heads of rows at once, or leaves them to others."""
        lay = self.layout
        heads = lay.rows * self.shape.heads // lay.tensor
        return "plain" if lay.attention == "fused" and heads % 4 else lay.attention

    def _scores(self) -> Lanes:
        s, lay, found = self.shape, self.layout, lanes()
        kernel = self._kernel()
        whole = s.scores(lay.attended) / s.parts.attending * lay.tokens / lay.tensor
        again = lay.recompute in ("full", "attention")
        if kernel in KERNELS_FUSED:
            head = (lay.attended, sum(s.widths) // 2)
            forward = self.source.attention(whole / 2, head, kernel, False).seconds
            back = self.source.attention(2.5 * whole / 2, head, kernel, True).seconds
            again = lay.recompute == "full"  # the kernel computes scores again by itself
            found["attention"] = back + forward * (2 if again else 1)
            return found
        # A batch of products, each of one head; the mask saves nothing.
        keys, values = s.widths
        heads = lay.rows * s.heads / lay.tensor
        forward = sum(
            self.source.product(lay.sequence, n, k, self._wide).seconds
            for n, k in ((lay.sequence, keys), (values, lay.sequence))
        )
        if keys % ALIGNED:
            forward *= SCALAR
        ahead, behind = SCORES[kernel]
        passed = heads * lay.sequence**2
        found["attention"] = heads * forward * (4 if again else 3)
        moved = passed * (behind + ahead * (2 if again else 1))
        found["scores"] = self.source.traffic(moved).seconds
        return found

    # -- recurrent states --------------------------------------------------------------------------

    def _recurrence(self) -> Lanes:
        """Its matrices, its convolution and gate, and the state over pieces of a sequence: within
        a piece as attention's products, from piece to piece by the state at its end."""
        s, lay = self.shape, self.layout
        assert s.recurrent is not None  # Shape sees to it
        r, t = s.recurrent, lay.tensor
        found = self._matrices(r.matrices(s.hidden), lay.tokens)
        states = r.inner * r.state / PIECE  # numbers of a token that are written as states
        halves = 2 * r.mixed + SCANNED * r.inner + CARRIED * states
        found["scan"] = self._elementwise(halves / t * lay.tokens)
        inner = max(1, r.inner // t)
        products = ((r.groups // t or 1) * PIECE, r.state), (inner, PIECE), (inner, 2 * r.state)
        tokens = max(1, round(lay.tokens))
        forward = sum(self.source.product(tokens, n, k, self._wide).seconds for n, k in products)
        # Back, two products for each, and states once more, which are not kept.
        found["scan"] += forward * (4 + (1 if lay.recompute == "full" else 0))
        return found

    # -- MLPs --------------------------------------------------------------------------------------

    def _mlp(self, inner: int, tokens: float, count: float, cut: int = 0, hidden: int = 0) -> Lanes:
        """Of one inner size, for so many experts with so many tokens each, of H or what is said."""
        t = cut or self.layout.tensor
        ends = not cut and self.layout.stack.stops  # of experts' results their weights need them
        found = self._matrices(self.shape.mlp(inner, hidden), tokens, t, ends)
        if cut and self.layout.stack.joined:  # gated and cast where products have their results
            width = CAST * 3 * (hidden or self.shape.hidden)
            found["cast"] = self.source.traffic(width * tokens).seconds
        else:
            gate = 3.0 if self.layout.stack.fused else GATED
            halves = (gate if self.shape.gated else 2.0) * inner / t
            found["traffic"] += self._elementwise(halves * tokens)
        made = lanes()
        add(made, found, count)
        return made

    def _experts(self) -> Lanes:
        """Router, shared experts, what goes to other workers and back, and the experts here."""
        s, lay = self.shape, self.layout
        if lay.recompute == "experts":
            return self.recomputed._experts()
        here = s.experts / lay.expert
        tokens = lay.tokens * s.active * lay.expert / s.experts
        if lay.tensor > 1:  # each worker sends its own part of the tokens
            tokens /= lay.tensor
        tokens = max(1, round(tokens / ALIGNED)) * ALIGNED  # they are padded
        found = self._mlp(s.expert_inner, tokens, here, cut=1, hidden=s.expert_hidden)
        if s.shared:
            add(found, self._mlp(s.shared, lay.tokens, 1))
        mine, hidden = lay.tokens / lay.tensor, s.expert_hidden or s.hidden
        add(found, self._matrices(s.around, mine))
        moved = MOVED * 2 * hidden * mine * s.active
        found["traffic"] += self._passes() * self.source.traffic(moved).seconds
        each = OF_EXPERT * (2 if lay.narrow else 1)
        kernels = (ROUTED + each * here) * self._passes()
        if lay.stack.told and self.machines.device.apart:
            found["called"] += LAUNCH * kernels  # none is called ahead of what the device does
        else:
            self.launch(found, kernels)
        if lay.expert > 1:
            group = self.ranks(lay.expert, lay.tensor)
            one = exchange(mine * hidden * stored(lay), s.active, group, self.machines)
            found["exchange"] += one * (6 if lay.recompute == "full" else 4)
        return found

    # -- what both have ----------------------------------------------------------------------------

    def _matrices(
        self,
        matrices: tuple[tuple[int, int, bool], ...],
        tokens: float,
        cut: int = 0,
        ends: bool = False,
    ) -> Lanes:
        """Products forward, back into inputs and into weights that are trained, and again where
        that is asked. ends: whether the last of them, whose result nothing needs, is left out."""
        found, lay = lanes(), self.layout
        lane = "narrow" if lay.narrow else "matmul"
        once = {"full": 1.0, "half": 0.5}.get(lay.recompute, 0.0)
        for index, (inner, out, divided) in enumerate(matrices):
            t = (cut or lay.tensor) if divided else 1
            column = index % 2 == 0
            n, k = (out / t, inner) if column else (out, inner / t)
            shapes = _three(tokens, n, k)
            each = [self.source.product(*shape, lay.precision).seconds for shape in shapes]
            again = 0.0 if ends and index == len(matrices) - 1 else once
            found[lane] += sum(each[: 2 if lay.frozen else 3]) + again * each[0]
            if lay.narrow:
                moved = CAST * tokens * (2 * k + n)
                found["cast"] += self.source.traffic(moved).seconds
        return found

    def _elementwise(self, halves: float) -> float:
        """Seconds of chains that touch so many halves forward."""
        return self._passes() * self.source.traffic(2 * halves).seconds

    def launch(self, found: Lanes, kernels: float) -> None:
        """So many calls: beside the device, or on a processor a part of what it does, as long as a
        probe has found them to be in a step."""
        device = self.machines.device
        each = device.measured.handed or device.measured.overhead
        if device.apart:
            found["launch"] += 0.0 if self.layout.stack.graphs else LAUNCH * kernels
        else:
            found["called"] += kernels * (LAUNCH if each is None else each.value)

    def _passes(self) -> float:
        again = {"full": 1.0, "half": 1.0, "norms": 0.6}.get(self.layout.recompute, 0.0)
        return 1 + BACK + again

    def _stream(self) -> Lanes:
        """Norms and sums of a layer, and the collectives of its tensor axis."""
        s, lay, found = self.shape, self.layout, lanes()
        t = lay.tensor
        spread = t if lay.sequence_parallel else 1
        chains = s.gated and not lay.stack.fused
        stream = (CHAIN if chains and not lay.stack.norms else STREAM) / spread
        stream += DROPPED / spread if s.dropout else 0.0
        turned = TURNED if s.gated or s.dropout else PLAIN
        halves = s.hidden * (stream + (ROTATED if chains else turned) / t)
        found["traffic"] = self._elementwise(halves * lay.tokens)
        apart = self.machines.device.apart
        kernels = self._passes() * ((KERNELS * (2 if chains else 1)) if apart else OWN)
        self.launch(found, kernels)
        if lay.stack.blocking:
            found["blocked"] = BLOCKED * kernels
        if t > 1:
            # Two sums forward and two back; with sequence parallelism the same bytes as gathers and
            # scatters, and the inputs once more where gradients of weights are computed.
            whole = lay.tokens * s.hidden * stored(lay)
            if lay.sequence_parallel:
                count = self._passed_on()
                one = seconds("gather", whole, self.tensor, self.machines)
            else:
                count = 4 + (2 if lay.recompute == "full" else 0)
                one = seconds("all_reduce", whole, self.tensor, self.machines)
            if lay.stack.behind:
                beside = 4 if lay.sequence_parallel else 2
                count, found["passed"] = count - beside, beside * one
            found["tensor"] = count * one / (2 if lay.stack.parallel else 1)
        return found

    def _passed_on(self) -> float:
        """Gathers and scatters of a layer under sequence parallelism, in those of 16 bits."""
        lay = self.layout
        full, distributed = lay.recompute == "full", lay.stack.distributed
        gathers = 4 if distributed else 6
        gathers += 2 if full or (distributed and lay.recompute == "half") else 0
        # In 8 bits where one scale for a tensor is known beforehand.
        narrow = distributed and lay.precision == "fp8"
        return gathers / (2 if narrow else 1) + (6 if full else 4)


def over_stages(work: Work) -> float:
    """Seconds of what a microbatch says where every stage has a part of the vocabulary: sums for
    the first layer, what the last one gives to all, and gradients the other way; beside vocabulary
    passes, waited for by interlaced ones, whose sums go to all (Yeung et al., Balancing pipeline
    parallelism with vocabulary parallelism, 2024)."""
    lay = work.layout
    group = work.ranks(lay.pipeline, lay.devices // lay.pipeline)
    size = lay.tokens * work.shape.hidden * stored(lay) / lay.tensor
    sums: Operation = "scatter" if lay.vocabulary == "cut" else "all_reduce"
    return sum(2 * seconds(one, size, group, work.machines) for one in ("gather", sums))


def padded(vocab: int) -> int:
    """Rows of a vocabulary as trainers keep them: whole tiles on each of eight workers."""
    return -(-vocab // PADDED) * PADDED


def lanes() -> Lanes:
    """None of any lane."""
    return defaultdict(float)


def add(into: Lanes, more: Mapping[str, float], times: float = 1.0) -> None:
    """Add lanes, so many times."""
    for lane, value in more.items():
        into[lane] += value * times


def _three(tokens: float, n: float, k: float) -> tuple[tuple[int, int, int], ...]:
    """(m, n, k) of a product, of its gradient into the input and into the weight."""
    m, n, k = max(1, round(tokens)), max(1, round(n)), max(1, round(k))
    return ((m, n, k), (m, k, n), (k, n, m))
