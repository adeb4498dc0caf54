"""NormalFloat in 4 bits, with scales that are quantised themselves.

Dettmers et al., "QLoRA: Efficient Finetuning of Quantized LLMs", 2023, section 3: 16 values that
divide a normal distribution evenly, times the largest magnitude of each group of 64 weights; these
magnitudes, less their mean, in 8 bits with a scale for 256 of them. Values, borders and the order
of codes in a byte are those of bitsandbytes.

    weights: nf4             # in a run's file, beside an adapter

A block has the magnitude's code before its 32 bytes; the mean and the second scales (float32) are
the weight's, and whole on every worker.

O outputs, I inputs, R bytes of a row, N groups.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from outsize.kernels.blockwise import table
from outsize.kernels.codes import Laid
from outsize.models.coding import FORMATS, Format, Grid, groups_of, numbers, pieces, raw, spelled

NAME, GROUP, GROUPS, NESTED = "nf4", 64, (16, 32, 64, 128, 256), 256
# Of the authors' code: quantiles of a normal distribution, symmetric, with a zero of its own.
VALUES = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
    0.7229568362236023, 1.0,
)  # fmt: skip
_TINY = 1e-38  # the least magnitude that is divided by


@dataclass(frozen=True)
class NormalFloat(Format):
    """The Format."""

    group: int = GROUP

    @property
    def name(self) -> str:
        return spelled(NAME, self.group, GROUP)

    @property
    def block(self) -> int:
        return 1 + self.group // 2

    @property
    def whole(self) -> bool:
        return False

    @property
    def bits(self) -> float:
        return 8 * self.block / self.group + 32 / (self.group * NESTED)

    def shared(self, rows: int, stride: int) -> int:
        return 4 * (1 + -(-rows * stride // NESTED))

    def encode(self, weight_OI: Tensor) -> tuple[Tensor, Tensor | None]:
        rows, inputs = weight_OI.shape
        stride, device = inputs // self.group, weight_OI.device
        codes = torch.empty(rows, stride, self.block, dtype=torch.uint8, device=device)
        largest = torch.empty(rows, stride, dtype=torch.float32, device=device)
        values = torch.tensor(VALUES, device=device)
        for first, last in pieces(rows, inputs):
            groups = weight_OI[first:last].to(torch.float32).view(-1, stride, self.group)
            most = largest[first:last] = groups.abs().amax(-1)
            here = _nearest(groups * (1 / most.clamp(min=_TINY)).unsqueeze(-1), values)
            codes[first:last, :, 1:] = (here[..., ::2] << 4) | here[..., 1::2]
        mean = largest.mean()
        nested, second = _nested(largest.flatten() - mean)
        codes[..., 0] = nested.view(rows, stride)
        return codes.view(rows, -1), raw(torch.cat((mean.view(1), second)), torch.float32)

    def laid(self, codes_OR: Tensor, shared: Tensor | None, grid: Grid) -> Laid:
        assert shared is not None, "its second scales"
        blocks = codes_OR.reshape(len(codes_OR), -1, self.block)
        values = torch.tensor(VALUES, device=codes_OR.device)
        largest = self._largest(blocks, shared, grid).view(-1, 1)
        return Laid(blocks.reshape(-1, self.block), largest, values, "pairs", 1)

    def _largest(self, blocks: Tensor, shared: Tensor, grid: Grid) -> Tensor:
        """The magnitude of each group, (rows, columns)."""
        rows, columns = blocks.shape[:2]
        of_row = torch.arange(rows, device=blocks.device) + grid.row
        of_column = torch.arange(columns, device=blocks.device) + grid.column
        number = of_row.unsqueeze(-1) * grid.stride + of_column
        every = numbers(shared, torch.float32)
        second = every[1:].index_select(0, number.flatten() // NESTED)
        names = blocks[..., 0].flatten().to(torch.int32)
        first = _dynamic(blocks.device).index_select(0, names)
        return (first * second + every[0]).view(rows, columns)


def _nearest(scaled: Tensor, values: Tensor) -> Tensor:
    """Codes of the nearest of rising values."""
    borders = (values[1:] + values[:-1]) / 2
    if len(values) == len(VALUES):  # quicker than to search
        found = torch.zeros_like(scaled, dtype=torch.uint8)
        for border in borders:
            found += scaled > border
        return found
    return torch.bucketize(scaled.clamp(-1, 1), borders, out_int32=True).to(torch.uint8)


def _dynamic(device: torch.device) -> Tensor:
    """The 256 values of magnitudes' codes: dynamic tree quantisation with a sign."""
    return torch.tensor(table(True).values.tolist(), device=device)


def _nested(numbers_N: Tensor) -> tuple[Tensor, Tensor]:
    """Codes of numbers and the scale of each 256 of them."""
    whole = torch.nn.functional.pad(numbers_N, (0, -len(numbers_N) % NESTED)).view(-1, NESTED)
    most = whole.abs().amax(-1)
    scaled = whole * (1 / most.clamp(min=_TINY)).unsqueeze(-1)
    return _nearest(scaled, _dynamic(numbers_N.device)).flatten()[: len(numbers_N)], most


def made(size: int | None) -> NormalFloat:
    return NormalFloat(groups_of(size, GROUP, GROUPS, NAME))


FORMATS.add(NAME, made)
