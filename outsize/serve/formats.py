"""What a model's weights cost in each format, what that does to held-out text, and how quick it is.

As Kurtic et al., "Give Me BF16 or Give Me Death?", 2024, lay them side by side: quality, and speed
where one asks, where several do, and in prompts.

B rows, S tokens of a row, T tokens laid flat, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn import functional as F

from outsize.checkpoint import adapters
from outsize.data import DataConfig, open_data
from outsize.data.batch import IGNORE, Batch
from outsize.data.stream import ValidationStream
from outsize.errors import OutsizeError
from outsize.models.coding import EIGHTS, FORMATS, PLAIN, asked
from outsize.models.config import DecoderConfig
from outsize.models.decoder import Decoder

ROW = 512  # tokens
PROMPT, DEPTH, SEVERAL = 256, 128, 16  # tokens of a prompt; before a new one; requests at once
_ROUNDED = (f"int8{EIGHTS[0]}",)  # what is looked at beside formats of weights


@dataclass(frozen=True)
class Speed:
    """Tokens a second, foretold by the price of a step as for serving: of a prompt, and new ones
    where one request is served and where SEVERAL are, behind DEPTH tokens each."""

    prompt: float = 0.0
    one: float = 0.0
    several: float = 0.0


@dataclass(frozen=True)
class Measured:
    """A format. bytes: of all parameters; bits: of a parameter; text: bits per byte of held-out
    text; speed; why: the reason where the model has no such format, and the others are 0."""

    name: str
    bytes: int = 0
    bits: float = 0.0
    text: float = 0.0
    speed: Speed = Speed()
    why: str = ""


def row_of(config: DecoderConfig, tokens: int) -> int:
    """Tokens of a row, where about so many are looked at."""
    return min(config.positions, tokens, ROW)


def text_of(data: DataConfig, config: DecoderConfig, tokens: int) -> ValidationStream:
    """The first rows that a run on such data holds out, of about so many tokens. OutsizeError as of
    open_data."""
    found = open_data(data, config.vocab).validation
    if not found.tokens:
        raise OutsizeError(f"{', '.join(data.paths())}: too little text to hold half of it out")
    return ValidationStream(found, 1, row_of(config, tokens), tokens)


def measured(
    directory: Path, text: ValidationStream, names: Sequence[str] = ()
) -> Iterator[Measured]:
    """Each format of a model, loaded one after another; plain first. names: of formats; none: all
    that there are. A directory of codes has its own alone."""
    config = adapters.read_config(directory)
    stored = config.coding is not None and config.coding.stored
    if stored:
        assert config.coding is not None
        names = (config.coding.format.name,)
    count = 0
    for name in names or (PLAIN, *FORMATS.names(), *_ROUNDED):
        try:
            name, model = _loaded(directory, config, (name,) if names else (name, *_finer(name)))
        except OutsizeError as error:
            if names:
                raise
            yield Measured(name, why=str(error).partition("; ")[0])
            continue
        held = sum(one.nbytes for one in model.parameters())
        count = count or weights_of(model)
        bits = text.bits_per_byte(loss_of(model, text))
        yield Measured(name, held, 8 * held / count, bits, speed_of(model))
        del model


def _finer(name: str) -> tuple[str, ...]:
    """The same with smaller groups, where it has such."""
    plainly, plus, behind = name.partition("+")
    return tuple(f"{plainly}:{size}{plus}{behind}" for size in (32, 16))


def _loaded(directory: Path, config: DecoderConfig, names: Sequence[str]) -> tuple[str, Decoder]:
    """In the first of these formats that the model can have. OutsizeError of the first."""
    first: OutsizeError | None = None
    for name in names:
        try:
            return name, adapters.load(directory, config=asked(config, name, "formats"))
        except OutsizeError as error:
            first = first or error
    assert first is not None, "there is a name"
    raise first


def weights_of(model: Decoder) -> int:
    """Its parameters, those that are coded counted as weights."""
    from outsize.models.linear import held

    own = sum(one.numel() for one in model.parameters() if one.dtype != torch.uint8)
    sizes = (one.sizes for _, one in held(model) if one.coded is not None)
    return own + sum(d_out * d_in for d_out, d_in in sizes)


def speed_of(model: Decoder) -> Speed:
    """From steps that are timed here, as the engine makes them."""
    from outsize.serve.probed import probed

    context = model.config.positions
    prompt, depth = min(PROMPT, context), min(DEPTH, context - 1)
    price = probed(model, range(len(model.blocks) + 2), prompt, context)

    def rate(count: int) -> float:
        return count / price.step(count, count, count * price.past(depth, 1))

    return Speed(prompt / price.prompt(prompt), rate(1), rate(SEVERAL))


@torch.no_grad()
def loss_of(model: Decoder, text: ValidationStream) -> float:
    """The loss of all targets together, in nats."""
    return sum(_loss_of(model, batch) for batch in text)


def _loss_of(model: Decoder, batch: Batch) -> float:
    positions_T, targets_T = batch.positions().flatten(), batch.targets_BS.flatten()
    context = model.context(positions_T, batch.flat_bounds())
    h_TD = model.hidden(batch.ids_BS.flatten(), context)
    logits_TV = model.epilogue.logits(h_TD).to(torch.float32)
    return float(F.cross_entropy(logits_TV, targets_T, ignore_index=IGNORE, reduction="sum"))
