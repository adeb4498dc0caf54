"""The coding seam: a Linear holds codes of few bits in the place of its weight, and no float.

What is stored is a Format's: groups of neighbouring weights of a row become a block of bytes, in
which the group's scale lies beside its codes. A block is never cut, so that codes pass through
chunks, pools, files and groups of workers as bytes of their own size. How a product by them is
taken is outsize/kernels/coded.py's.

O outputs, I inputs, G weights of a group, B bytes of its block, R bytes of a row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from outsize.errors import OutsizeError
from outsize.registry import Registry

if TYPE_CHECKING:
    from outsize.kernels.codes import Laid
    from outsize.kernels.rows import Rounding
    from outsize.models.config import DecoderConfig
    from outsize.models.cuts import Cut

CODES, SCALES = "codes", "code_scales"  # the parameters of a Linear that is coded
KEY = "weights"  # of a run
SAID = "outsize_weights"  # in the config.json of what is trained beside plain files
STORED, METHOD = "quantization_config", "outsize"  # in that of files which hold codes
PLAIN = "plain"  # weights as they are
AS_STORED = "as-stored"  # in numbers or codes, as the files have them
HEAD = "+head"  # behind a format: the head is held in 8 bits too
# Behind that: what is multiplied by codes is rounded to 8 bits (kernels/eights.py), all of it, or
# all but numbers of great magnitude.
EIGHTS: tuple[Rounding, ...] = ("+a8", "+outliers")
_HEADS = ("int8:64", "int8:32", "int8:16")  # the first whose groups divide it
PIECE = 1 << 18  # weights that are coded at a time
BESIDE = 24  # bytes for each of these, at most, while they are


@dataclass(frozen=True)
class Grid:
    """Which groups of a weight lie here: row r has those from (row + r) stride + column on."""

    stride: int
    row: int = 0
    column: int = 0

    def below(self, rows: int) -> Grid:
        """That of what is left when so many rows are gone."""
        return replace(self, row=self.row + rows)


class Format(Protocol):
    """How weights become codes. name: as a run says it; group, block: weights and bytes of one;
    bits: of a weight, all counted."""

    @property
    def name(self) -> str: ...

    @property
    def group(self) -> int: ...

    @property
    def block(self) -> int: ...

    @property
    def bits(self) -> float: ...

    @property
    def whole(self) -> bool:
        """Whether codes are whole numbers, with one scale for a group."""

    def shared(self, rows: int, stride: int) -> int:
        """Bytes that all groups of a weight share, of so many rows of so many; 0: none."""

    def encode(self, weight_OI: Tensor) -> tuple[Tensor, Tensor | None]:
        """codes_OR and what groups share, uint8."""

    def decode(
        self,
        codes_OR: Tensor,
        shared: Tensor | None,
        grid: Grid,
        dtype: torch.dtype = torch.float32,
    ) -> Tensor:
        """weight_OI of any rows and blocks of a weight: numbers of float32, rounded to `dtype`."""
        from outsize.kernels.codes import decoded as numbers_of

        laid = self.laid(codes_OR, shared, grid)
        assert laid is not None, "of values times scales"
        return numbers_of(laid, dtype).view(len(codes_OR), -1)

    def laid(self, codes_OR: Tensor, shared: Tensor | None, grid: Grid) -> Laid | None:
        """The same as blocks and what their codes stand for, None where they are no values times
        scales."""

    def finite(self, codes_OR: Tensor, shared: Tensor | None) -> bool:
        """Whether all scales are: here those of float32 that groups share."""
        assert shared is not None, "its scales"
        return bool(numbers(shared, torch.float32).isfinite().all())


# By name, what makes a format for groups of a size; None: its own.
FORMATS: Registry[Callable[[int | None], Format]] = Registry("format of weights", "quant")


def format_of(name: str, source: str = KEY) -> Format:
    """The format that a name, or one with groups of a size ("NAME:128"), stands for. OutsizeError
    for what is none."""
    plain, colon, size = name.partition(":")
    try:
        if colon and not size.isdecimal():
            raise OutsizeError(f"groups of {size!r}; expected a number of weights, as {plain}:64")
        return FORMATS.get(plain)(int(size) if colon else None)
    except OutsizeError as error:
        raise OutsizeError(f"{source}: {name!r}: {error}") from None


@dataclass(frozen=True)
class Coding:
    """How a decoder's Linears are held. stored: whether its files have them so; head: how the head
    is, None: as it lies; eights: how what they multiply is rounded to 8 bits."""

    format: Format
    stored: bool = False
    head: Format | None = None
    eights: Rounding = ""

    @property
    def name(self) -> str:
        return f"{self.format.name}{self.behind}"

    @property
    def behind(self) -> str:
        """What is of serving alone, as it stands behind the format."""
        return ("" if self.head is None else HEAD) + self.eights

    def of(self, module: str) -> Format:
        """That of a Linear by its name."""
        own = self.head is not None and module.startswith("epilogue.")
        return self.head if own and self.head is not None else self.format


def divided(format: Format, name: str, d_in: int) -> None:
    """OutsizeError where groups do not divide the rows of a weight."""
    if d_in % format.group:
        way = next((f"smaller groups (FORMAT:{n}) or " for n in (64, 32, 16) if not d_in % n), "")
        what = f"groups of {format.group} weights, which do not divide the {d_in} inputs of {name}"
        raise OutsizeError(f"{KEY}: {format.name} has {what}; choose {way}another format")


@dataclass(frozen=True)
class Coded:
    """What a Linear is coded as, which part lies here. eights: of Coding; packed: by eights.py."""

    format: Format
    grid: Grid
    eights: Rounding = ""
    packed: bool = False

    def part(self, cut: Cut) -> Coded:
        """What is left where its codes are cut."""
        if cut.dim is None:
            return self
        ((first, _),), grid = cut.spans, self.grid
        if cut.dim == 0:
            return replace(self, grid=grid.below(first))
        column = grid.column + first // self.format.block
        return replace(self, grid=replace(grid, column=column))


def coded(
    config: DecoderConfig,
    format: Format,
    stored: bool = False,
    head: Format | None = None,
    eights: Rounding = "",
) -> DecoderConfig:
    """The same model with its blocks' Linears in a format, and what its config.json says then."""
    said, coding = _unsaid(config), Coding(format, stored, head, eights)
    said |= {STORED: {"quant_method": METHOD, "format": format.name}} if stored else {}
    said |= {} if stored else {SAID: coding.name}
    return replace(config, coding=coding, source=said)


def _unsaid(config: DecoderConfig) -> dict[str, Any]:
    return {k: v for k, v in config.source.items() if k not in (STORED, SAID)}


def as_stored(config: DecoderConfig) -> DecoderConfig:
    """The same model, whose files hold its codes."""
    assert config.coding is not None, "it is coded"
    if config.coding.behind:
        why = f"files hold the blocks' codes alone: leave {config.coding.behind} out"
        raise OutsizeError(f"{KEY}: {config.coding.name} is of serving; {why}")
    return coded(config, config.coding.format, stored=True)


def plain(config: DecoderConfig) -> DecoderConfig:
    """The same model with weights."""
    return replace(config, coding=None, source=_unsaid(config))


def asked(config: DecoderConfig, name: str | None, where: str = KEY) -> DecoderConfig:
    """The same model in the format of a name; None: as its files have it. OutsizeError where these
    have another."""
    if name is None or name == AS_STORED:
        return config
    stored = config.coding is not None and config.coding.stored
    if name == PLAIN and not stored:
        return plain(config)
    plainly, head, eights = _parts(name, where)
    format = format_of(plainly, where)
    if eights and not format.whole:
        fitting = ", ".join(one for one, made in FORMATS.items() if made(None).whole)
        raise OutsizeError(
            f"{where}: {eights} multiplies whole numbers, and codes of {format.name} are none;"
            f" expected one of {fitting}; leave {eights} out"
        )
    if config.coding is not None and stored:
        if config.coding.format.name != format.name or head:
            raise OutsizeError(
                f"{where} is {name!r}, but the model's files hold {config.coding.format.name};"
                " leave it out, or begin with the model before it was converted"
            )
        return replace(config, coding=replace(config.coding, eights=eights)) if eights else config
    own = _head_of(config, where) if head else None
    return coded(config.untied() if head else config, format, False, own, eights)


def _parts(name: str, where: str) -> tuple[str, bool, Rounding]:
    """A format's name, whether HEAD stands behind it, and which of EIGHTS. OutsizeError for
    anything else there."""
    plainly, *behind = name.split("+")
    said = [f"+{one}" for one in behind]
    rounding = [one for one in EIGHTS if one in said]
    if set(said) - {HEAD, *EIGHTS} or len(rounding) > 1:
        one_of = " or ".join(EIGHTS)
        raise OutsizeError(f"{where}: {name!r}: expected a format, {HEAD} and {one_of} behind it")
    return plainly, HEAD in said, rounding[0] if rounding else ""


def held(
    config: DecoderConfig, name: str | None, where: str
) -> tuple[DecoderConfig, torch.dtype | None]:
    """What is to be served by such a name, and its dtype where that is not the files' own.
    OutsizeError as of asked."""
    return (config, torch.bfloat16) if name == "bf16" else (asked(config, name, where), None)


def _head_of(config: DecoderConfig, where: str) -> Format:
    """What a head is held in. OutsizeError for one whose rows no groups divide."""
    width = config.embed_size or config.hidden
    fitting = (one for one in map(format_of, _HEADS) if width % one.group == 0)
    found = next(fitting, None)
    if found is None:
        why = f"which do not divide the head's {width} inputs; leave {HEAD} out"
        raise OutsizeError(f"{where}: {HEAD} has groups of 16 weights, {why}")
    return found


def read(config: DecoderConfig) -> DecoderConfig:
    """The model that a config.json says, with the coding that it says. OutsizeError for one that is
    not known."""
    said, beside = config.source.get(STORED), config.source.get(SAID)
    if said is None:
        return config if beside is None else asked(config, str(beside), f"config.json: {SAID}")
    method = said.get("quant_method") if isinstance(said, Mapping) else said
    if method != METHOD or not isinstance(said.get("format"), str):
        raise OutsizeError(
            f"config.json: {STORED} has quant_method {method!r}, which is not read; expected"
            f" {METHOD!r} (outsize convert --weights); load the unquantised weights"
        )
    return coded(config, format_of(said["format"], f"config.json: {STORED}"), stored=True)


def weight_of(name: str) -> str:
    """The name of a parameter, or of the weight that it codes."""
    return f"{name.removesuffix(CODES)}weight" if name.endswith(f".{CODES}") else name


def encoded(format: Format, weight: Tensor, name: str) -> dict[str, Tensor]:
    """The parameters of a Linear in the place of its weight, by leaf. OutsizeError for a weight
    with numbers that are not finite."""
    codes, shared = format.encode(weight)
    if not codes.is_meta and not format.finite(codes, shared):
        raise OutsizeError(
            f"{name}: its scales are not finite; expected a weight of finite numbers"
        )
    return {CODES: codes} if shared is None else {CODES: codes, SCALES: shared}


def decoded(format: Format, codes_OR: Tensor, shared: Tensor | None) -> Tensor:
    """The whole weight, float32; on meta, where decoding would import a compiler, its shape."""
    groups = codes_OR.shape[1] // format.block
    if codes_OR.is_meta:
        return torch.empty(len(codes_OR), groups * format.group, device="meta", dtype=torch.float32)
    return format.decode(codes_OR, shared, Grid(groups))


@dataclass(frozen=True)
class Blocks:
    """A Format all of whose bytes lie in the groups' blocks. pack: blocks (N, B) of groups (N, G)
    in float32; scales: of blocks, as numbers; lay: what codes of blocks stand for, or, where that
    is no value times a scale, unpack: the way back, rounded to a dtype; whole: as a Format's."""

    name: str
    group: int
    block: int
    pack: Callable[[Tensor], Tensor]
    scales: Callable[[Tensor], Tensor]
    lay: Callable[[Tensor], Laid] | None = None
    unpack: Callable[[Tensor, torch.dtype], Tensor] | None = None
    whole: bool = False

    @property
    def bits(self) -> float:
        return 8 * self.block / self.group

    def shared(self, rows: int, stride: int) -> int:
        return 0

    def encode(self, weight_OI: Tensor) -> tuple[Tensor, Tensor | None]:
        rows, inputs = weight_OI.shape
        wide = inputs // self.group * self.block
        codes_OR = torch.empty(rows, wide, dtype=torch.uint8, device=weight_OI.device)
        for first, last in pieces(rows, inputs):
            groups_NG = weight_OI[first:last].to(torch.float32).reshape(-1, self.group)
            codes_OR[first:last] = self.pack(groups_NG).view(-1, wide)
        return codes_OR, None

    def decode(
        self,
        codes_OR: Tensor,
        shared: Tensor | None,
        grid: Grid,
        dtype: torch.dtype = torch.float32,
    ) -> Tensor:
        from outsize.kernels.codes import decoded as numbers_of

        laid = self.laid(codes_OR, shared, grid)
        if laid is not None:
            return numbers_of(laid, dtype).view(len(codes_OR), -1)
        assert self.unpack is not None, "its own way"
        return self.unpack(codes_OR.reshape(-1, self.block), dtype).view(len(codes_OR), -1)

    def laid(self, codes_OR: Tensor, shared: Tensor | None, grid: Grid) -> Laid | None:
        return None if self.lay is None else self.lay(codes_OR.reshape(-1, self.block))

    def finite(self, codes_OR: Tensor, shared: Tensor | None) -> bool:
        return bool(self.scales(codes_OR.reshape(-1, self.block)).isfinite().all())


def pieces(rows: int, inputs: int) -> Iterator[tuple[int, int]]:
    """Runs of rows that are coded at a time."""
    step = max(1, PIECE // inputs)
    return ((first, min(first + step, rows)) for first in range(0, rows, step))


def numbers(raw: Tensor, dtype: torch.dtype) -> Tensor:
    """Bytes (..., n) as numbers in float32, wherever they lie."""
    return raw.clone(memory_format=torch.contiguous_format).view(dtype).to(torch.float32)


def raw(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Numbers (..., n) as bytes."""
    return values.to(dtype).contiguous().view(torch.uint8)


def over(values: Tensor, scale: Tensor) -> Tensor:
    """values / scale, 0 (of their sign) where the scale is. values: finite where it is 0."""
    return values / scale.masked_fill(scale == 0, math.inf)


def halves(codes_NG: Tensor) -> Tensor:
    """Codes of 4 bits (uint8), the first half of a group in the lower bits of its bytes."""
    low, high = codes_NG.chunk(2, -1)
    return low | (high << 4)


def groups_of(size: int | None, usual: int, allowed: tuple[int, ...], name: str) -> int:
    """The groups that were asked for. OutsizeError for a size that the format does not have."""
    if size is None:
        return usual
    if size not in allowed:
        raise OutsizeError(
            f"{name} has groups of {size}; expected one of {', '.join(map(str, allowed))}"
        )
    return size


def spelled(name: str, group: int, usual: int) -> str:
    """As a run says it."""
    return name if group == usual else f"{name}:{group}"
