"""What a step of serving takes on devices that are not here: the price of steps from their sheets.

A step of few tokens reads the weights; one of many computes. Between layers the workers of a tensor
axis sum, and every kernel has a start and an end. Nothing is fitted: each constant has a source.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from outsize.errors import OutsizeError
from outsize.foresight.layout import NARROW
from outsize.foresight.shape import Shape
from outsize.foresight.sources import BYTES, Roofline, source_of
from outsize.hardware.cluster import Group
from outsize.models.coding import Format
from outsize.serve.price import Curve, Price

# Parts of the sheet that long runs reach: AIConfigurator's of memory, raised by what streaming
# weights does better than elementwise work; half of attention's peak (Dao, FlashAttention-2, 2023).
STREAMED, SEEN = 0.85, 0.5
COMPUTED = (
    0.75  # of the peak, of products of many tokens (measured by others of an H100: 0.7 to 0.8)
)
STARTED = 3e-6  # seconds in which a kernel begins and ends (AIConfigurator)
KERNELS = (
    12  # of a layer: four products, attention with its sum, norms, rotation, cache, gate, sums
)
CASTS = 4  # further ones where products are in 8 bits: of the inputs of each
# Launches of a cast by a scale of its own: a zero, the largest value, the cast (vLLM's
# scaled_fp8_quant without a scale); on the device they take together what one kernel does.
CAST = 3
# Seconds to launch one where no graph was captured (Python, PyTorch): steps in which nobody but
# draws are captured, those that feed prompts are not.
LAUNCHED = 20e-6
# Part of the memory's bandwidth that elementwise work reaches (the training runs of
# outsize/foresight/data/constants.json: `traffic`).
PASSED = 0.71
# Elements that are read and written for each token: two norms that add what came before (four
# each), the gate (two and one), rotated queries and keys, keys and values into the cache (vLLM's
# fused kernels); a cast by a scale of its own reads its input twice.
NORMED, GATED, TURNED, KEPT, CAST_READS = 8, 3, 2, 4, 2
# Bytes from which on sums are NCCL's (vLLM's own kernel takes fewer), and its seconds: to begin,
# and for each of a ring's steps over NVLink (NCCL 2.19, tuning.cc, Simple).
OWN, RING, RING_STEP = 8 << 20, 8.4e-6, 3.4e-6
TILE = 128  # rows and columns of a product that one multiprocessor computes at once
AHEAD = 1.5  # times its share of the memory's bandwidth that a multiprocessor alone draws
# Tokens of the steps that are priced, others between them: up to 1,024 each tile's last and first.
SAMPLED = (
    1, 2, 4, 8, 16, 32, 33, 64,
    *(tokens for full in range(TILE, 1025, TILE) for tokens in (full, full + 1)),
    1536, 2048, 3072, 4096,
)  # fmt: skip


@dataclass(frozen=True)
class Served:
    """A model on the workers of a tensor axis. host, each: seconds of the processor in every step
    and for every request that draws in it: scheduling, sampling, answers. codes: what the blocks'
    weights lie in; they are read as such and unpacked beside products in `precision` (Frantar et
    al., "MARLIN", 2024)."""

    shape: Shape
    machines: Group
    tensor: int
    precision: str
    host: float
    each: float = 0.0
    codes: Format | None = None

    def __post_init__(self) -> None:
        if self.codes is None:
            return
        if self.machines.device.banks is not None:
            raise OutsizeError(f"{self.codes.name} is not priced in memory that computes")
        s = self.shape
        wide = [s.d_inner] * bool(s.parts.plain) + [s.expert_inner] * bool(s.parts.routed)
        for some in (s.attention, *map(s.mlp, wide)):
            for index, (inner, out, cut) in enumerate(some):
                _, inputs = self._cut(inner, out, cut, index)
                if inputs % self.codes.group:
                    raise OutsizeError(
                        f"{self.codes.name} has groups of {self.codes.group} weights, which do not"
                        f" divide the {inputs} inputs of a product on one worker"
                    )

    @property
    def _bytes(self) -> float:
        """Bytes of a weight of the blocks."""
        return BYTES[self.precision] if self.codes is None else self.codes.bits / 8

    def price(self) -> Price:
        """Of its steps."""
        device, s = self.machines.device, self.shape
        blocks = tuple((n, self._blocks(n)) for n in SAMPLED)
        head = tuple(
            (n, self._product(n, s.vocab // self.tensor, s.hidden, "bf16") + n * self.each)
            for n in (1, 16, 256)
        )
        inside = device.bandwidth.value * STREAMED
        read = self.cached / (inside if device.banks is None else device.banks.inside)
        keys, values = s.widths
        work = 2.0 * s.layers * s.heads * (keys + values) / self.tensor
        seen = work / (Roofline(device).peak("bf16") * SEEN)
        launched = 0.0 if device.banks is not None else self._launched
        return Price(Curve(blocks), Curve(head), visit=seen, load=read, launched=launched)

    @property
    def cached(self) -> float:
        """Bytes of a token in the cache of one worker."""
        s = self.shape
        if s.latent is not None:
            return 2.0 * s.layers * (s.latent.values + s.latent.rotary)
        return 2.0 * 2 * s.layers * max(1.0, s.n_groups / self.tensor) * s.d_head

    @property
    def weights(self) -> float:
        """Bytes on one worker."""
        ends = self.shape.of_vocabulary * (1 if self.shape.tied else 2)
        ends += self.shape.layers * self.shape.of_norms
        inner = self.shape.parameters - ends
        return (inner * self._bytes + 2.0 * ends) / self.tensor

    def _blocks(self, tokens: int) -> float:
        """Seconds of so many tokens through the blocks, with nothing before them."""
        s, found = self.shape, self.host
        products = sum(
            self._product(tokens, *self._cut(inner, out, cut, index), self.precision, self._bytes)
            for index, (inner, out, cut) in enumerate(s.attention)
        )
        dense = s.parts.plain / s.layers
        layer = products + dense * self._mlp(tokens, s.d_inner)
        if s.parts.routed:
            layer += s.parts.routed / s.layers * self._experts(tokens)
        if self.tensor > 1:
            layer += 2 * self._sum(2.0 * tokens * s.hidden)
        if self.machines.device.banks is not None:  # its commands come without a host
            return found + s.layers * layer
        layer += sum(self._kernels) * STARTED + self._passes(tokens)
        return found + s.layers * layer

    @property
    def _kernels(self) -> tuple[int, int]:
        """Of a layer: kernels, and casts."""
        kernels = KERNELS + (KERNELS if self.shape.parts.routed else 0)
        return kernels, CASTS if self.precision in NARROW else 0

    @property
    def _launched(self) -> float:
        """Seconds in which the host launches a step's kernels one by one."""
        kernels, casts = self._kernels
        return self.host + self.shape.layers * (kernels + CAST * casts) * LAUNCHED

    def _sum(self, bytes_: float) -> float:
        """Seconds of one sum over the workers."""
        inner = self.machines.levels[0]
        moved = 2.0 * bytes_ / inner.bandwidth.value
        if bytes_ < OWN:
            return inner.latency.value + moved
        return max(inner.latency.value, RING + 2 * (self.tensor - 1) * RING_STEP) + moved

    def _passes(self, tokens: int) -> float:
        """Seconds of a layer's elementwise work."""
        s, wide = self.shape, self.machines.device.bandwidth.value * PASSED
        heads = s.heads * s.d_head / self.tensor
        groups = max(1.0, s.n_groups / self.tensor) * s.d_head
        routed = s.parts.routed / s.layers
        inner = (1 - routed) * s.d_inner + routed * (s.active * s.expert_inner + s.shared)
        inner /= self.tensor
        moved = NORMED * s.hidden + GATED * inner + TURNED * (heads + groups) + KEPT * groups
        moved *= 2.0
        if self.precision in NARROW:
            moved += (2.0 * CAST_READS + 1) * (2 * s.hidden + heads + inner)
        return tokens * moved / wide

    def _mlp(self, tokens: float, inner: int) -> float:
        return sum(
            self._product(tokens, *self._cut(i, o, cut, index), self.precision, self._bytes)
            for index, (i, o, cut) in enumerate(self.shape.mlp(inner))
        )

    def _experts(self, tokens: int) -> float:
        """Those that any of the tokens meets are read; each has its own tokens."""
        s = self.shape
        met = s.experts * (1 - (1 - s.active / s.experts) ** tokens)
        each = self._mlp(max(1.0, tokens * s.active / met), s.expert_inner)
        return met * each + (self._mlp(tokens, s.shared) if s.shared else 0.0)

    def _cut(self, inner: int, out: int, cut: bool, index: int) -> tuple[int, int]:
        """(columns, inner size) on one worker: first products by columns, second ones by rows."""
        if not cut:
            return out, inner
        return (out // self.tensor, inner) if index % 2 == 0 else (out, inner // self.tensor)

    def _product(
        self, tokens: float, out: int, inner: int, dtype: str, each: float | None = None
    ) -> float:
        """Seconds of reading the weights, by as many multiprocessors as have columns of their own
        where nothing splits the inner dimension (8 bits), or of computing. each: bytes of a weight,
        None for those of the dtype."""
        device = self.machines.device
        if device.banks is not None:
            return source_of(device).product(math.ceil(tokens), out, inner, dtype).seconds
        wide = device.bandwidth.value * STREAMED
        if dtype in NARROW and device.cores:
            wide *= min(1.0, AHEAD * math.ceil(out / TILE) / device.cores)
        read = out * inner * (each or BYTES[dtype]) / wide
        done = 2.0 * _rows(tokens) * out * inner
        return max(read, done / (Roofline(device).peak(dtype) * COMPUTED))


def _rows(tokens: float) -> int:
    """Rows that a product of so many tokens computes: whole tiles, narrower ones for fewer."""
    rows = math.ceil(tokens)
    tile = min(TILE, 1 << (rows - 1).bit_length())
    return -(-rows // tile) * tile
