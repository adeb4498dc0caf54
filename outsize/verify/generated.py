"""Generation against a plain loop, token by token: a model's directory as `outsize generate` opens
it (in memory, in its files within a budget, on a mesh), and what it hands to other programs.

The plain loop has no cache, no slices and one process: for each token the whole model, in PyTorch's
operators, over all that came before. Rows of its logits do not see what is behind them, so that one
pass over the prompt and what was generated gives those of every turn of the loop.

V vocabulary, T tokens of a prompt and what follows it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf, isfinite
from pathlib import Path

import torch
from torch import Tensor

from outsize import accelerator
from outsize.checkpoint import adapters
from outsize.checkpoint.adapters import model_directory, read_config
from outsize.collectives import Mesh, World
from outsize.collectives.threads import play
from outsize.decode.generate import GREEDY, Request
from outsize.decode.samplers import Sampling
from outsize.errors import OutsizeError
from outsize.models.config import DecoderConfig
from outsize.models.decoder import Decoder
from outsize.models.layout import prompted
from outsize.models.random import bits
from outsize.plan import Precision
from outsize.plan.settings import Settings
from outsize.runtime.generating import Generated
from outsize.serve.files import Limits
from outsize.serve.load import on_mesh
from outsize.serve.model import Model
from outsize.verify.bounds import Bounds, Key, Moved, Over
from outsize.verify.compare import LIMIT
from outsize.verify.handed import Handed, handed
from outsize.verify.naive import logits_of, simple
from outsize.verify.planned import judging
from outsize.verify.rounding import Rounding

EXACT = torch.float64
LENGTHS = (1, 7)  # of prompts, in tokens; and one that is longer than windows are
LONGEST = 96
DRAWN = Sampling(temperature=0.8, top_p=0.9, seed=1)


@dataclass(frozen=True)
class Asked:
    """What is generated, and how. tokens: that follow each prompt; seed: of the prompts; device: as
    of a Case."""

    directory: Path
    tokens: int
    mesh: Mesh
    limits: Limits | None
    settings: Settings
    device: str = "cpu"
    seed: int = 0

    @cached_property
    def found(self) -> Path:
        """The model's own directory, which that of a run has its checkpoints beside."""
        return model_directory(self.directory)

    @cached_property
    def config(self) -> DecoderConfig:
        """Of the model."""
        return read_config(self.found)

    def requests(self) -> list[Request]:
        """A prompt of one token and a long one, greedy, and one whose tokens are drawn."""
        windows = [layer.window for layer in self.config.layers if layer.window]
        long = min(LONGEST, max((*LENGTHS, *windows)) + 9)
        room = self.config.learned_positions - self.config.position_offset
        room -= self.config.virtual
        if self.config.learned_positions:
            long = min(long, room - self.tokens + 1)
        if long < max(LENGTHS):
            raise OutsizeError(
                f"--generate {self.tokens}: prompts of {max(LENGTHS)} tokens go before, and this"
                f" {self.config.family} model has learned {room} positions; expected at most"
                f" {room - max(LENGTHS) + 1}"
            )
        one, few = (self._prompt(length) for length in LENGTHS)
        found = ((one, GREEDY), (few, DRAWN), (self._prompt(long), GREEDY))
        asked = ((prompted(ids, self.config.virtual), how) for ids, how in found)
        return [Request(ids, self.tokens, how, scored=True) for ids, how in asked]

    def _prompt(self, length: int) -> tuple[int, ...]:
        words = bits(self.seed, f"prompt of {length}", 0, length)
        return tuple(int(word) % self.config.vocab for word in words)

    def open(self, world: World, dtype: torch.dtype | None) -> Model:
        """One worker's part of the model, as `outsize generate` has it."""
        device = accelerator.take(judging(self.device, self.mesh.size), world.rank, self.mesh.size)
        if self.mesh.size == 1 and self.limits is None:
            return Model(adapters.load(self.found, dtype, accelerator.named(device)))
        return on_mesh(self.found, world, dtype, device, None, self.limits, self.settings)


@dataclass(frozen=True)
class Row:
    """One request in float64. prompt: its tokens; drawn: how the next ones were chosen; tokens:
    these; logprob: the largest difference of the log of a token's probability, as a part of it
    where it is above one; differs: the number of the first token that the plain loop has another
    one for."""

    prompt: int
    drawn: str
    tokens: tuple[int, ...]
    logprob: float
    differs: int | None

    @property
    def holds(self) -> bool:
        return self.differs is None and self.logprob <= LIMIT


@dataclass(frozen=True)
class Spoken:
    """The verdict. differ: workers whose tokens or log-probabilities are not the first one's;
    precision: that of the files, where it is not float64; bounds, over: what rounding allows of the
    log-probabilities and greedy choices there, and what is beyond it."""

    rows: tuple[Row, ...]
    differ: tuple[int, ...]
    handed: Handed
    precision: str
    bounds: Bounds | None = None
    over: tuple[Over, ...] = ()

    @property
    def holds(self) -> bool:
        within = all(row.holds for row in self.rows) and not self.over
        return within and not self.differ and self.handed.holds


def spoken(asked: Asked) -> Spoken:
    """Generate both ways, the workers as threads of this process, and compare. OutsizeError for
    what cannot be generated."""
    requests, model = asked.requests(), adapters.load(asked.found)
    dtype = model.prologue.tokens.weight.dtype
    plain, precision = simple(model.to(EXACT)), str(dtype).removeprefix("torch.")
    found, differ = _generated(asked, requests, EXACT)
    rows = tuple(_row(plain, request, one) for request, one in zip(requests, found, strict=True))
    others = handed(asked.found, asked.config, plain, requests[-1].ids)
    if dtype == EXACT:
        return Spoken(rows, differ, others, precision)
    own, apart = _generated(asked, requests, None)
    bounds, over = _own(plain, requests, own, Precision.named(precision))
    return Spoken(rows, tuple(sorted({*differ, *apart})), others, precision, bounds, over)


def _generated(
    asked: Asked, requests: Sequence[Request], dtype: torch.dtype | None
) -> tuple[list[Generated], tuple[int, ...]]:
    """What follows each prompt, and the workers that have something else than the first."""

    def work(world: World) -> list[Generated]:
        with asked.open(world, dtype) as model:
            return [model.scored(request) for request in requests]

    first, *others = play(asked.mesh, work)
    return first, tuple(rank for rank, one in enumerate(others, start=1) if one != first)


# -- the plain loop --------------------------------------------------------------------------------


@torch.no_grad()
def _plain(model: Decoder, ids: Sequence[int], generated: Sequence[int]) -> Tensor:
    """logits_NV that the plain loop draws each of the generated tokens from."""
    ids_T = torch.tensor([*ids, *generated[:-1]])
    every_TV = logits_of(model, ids_T, torch.arange(len(ids_T)), (0, len(ids_T)))
    return every_TV[len(ids) - 1 :]


def _row(plain: Decoder, request: Request, found: Generated) -> Row:
    logits_NV = _plain(plain, request.ids, found.tokens)
    other = [request.sampler(row, index) for index, row in enumerate(logits_NV)]
    pairs = enumerate(zip(found.tokens, other, strict=True))
    differs = next((index for index, (mine, right) in pairs if mine != right), None)
    right_N = _logprobs(logits_NV, found.tokens)
    apart_N = (torch.tensor(found.logprobs, dtype=EXACT) - right_N).abs() / right_N.abs().clamp(
        min=1.0
    )
    worst = float(apart_N.max())
    how = "greedy" if request.sampler == GREEDY else "drawn"
    return Row(
        len(request.ids), how, tuple(found.tokens), worst if isfinite(worst) else inf, differs
    )


def _logprobs(logits_NV: Tensor, tokens: Sequence[int]) -> Tensor:
    chosen_N1 = torch.tensor(tokens).unsqueeze(1)
    return logits_NV.double().log_softmax(-1).gather(1, chosen_N1).squeeze(1)


# -- in the precision of the files -----------------------------------------------------------------


def _own(
    plain: Decoder, requests: Sequence[Request], found: Sequence[Generated], precision: Precision
) -> tuple[Bounds, tuple[Over, ...]]:
    """What rounding allows of what was generated in a precision, and what is beyond it.

    A greedy token is the likeliest of its own logits: by how much float64 prefers another one is
    what rounding must have moved.
    """
    truth = [_plain(plain, r.ids, one.tokens) for r, one in zip(requests, found, strict=True)]
    right = [_logprobs(logits, one.tokens) for logits, one in zip(truth, found, strict=True)]
    gaps = [_gaps(logits, logits, one.tokens) for logits, one in zip(truth, found, strict=True)]

    def moved(seed: int) -> Mapping[Key, float]:
        rounding, logprobs, others = Rounding(precision, seed), [], []
        for request, one, best_NV in zip(requests, found, truth, strict=True):
            with rounding:
                logits_NV = _plain(plain, request.ids, one.tokens)
            logprobs.append(_logprobs(logits_NV, one.tokens))
            others.append(_gaps(best_NV, logits_NV, one.tokens))
        return numbers(logprobs, others)

    def numbers(logprobs: Sequence[Tensor], others: Sequence[Tensor]) -> dict[Key, float]:
        """How far they are from the plain loop's."""
        made: dict[Key, float] = {}
        for i, request in enumerate(requests):
            made |= _named(request, "log-probability", logprobs[i] - right[i])
            if request.sampler == GREEDY:
                made |= _named(request, "choice", others[i] - gaps[i])
        return made

    said = [torch.tensor(one.logprobs, dtype=EXACT) for one in found]
    return Moved(moved).judge(numbers(said, [torch.zeros_like(gap_N) for gap_N in gaps]))


def _named(request: Request, what: str, apart_N: Tensor) -> dict[Key, float]:
    """By token."""
    prompt = f"prompt of {len(request.ids)}"
    return {
        (prompt, f"{what} of token {i}"): float(x) for i, x in enumerate(apart_N.abs(), start=1)
    }


def _gaps(best_NV: Tensor, logits_NV: Tensor, tokens: Sequence[int]) -> Tensor:
    """By how much the token that `best` prefers is above the one that was taken."""
    likeliest_N1, taken_N1 = best_NV.argmax(-1, keepdim=True), torch.tensor(tokens).unsqueeze(1)
    return (logits_NV.gather(1, likeliest_N1) - logits_NV.gather(1, taken_N1)).squeeze(1)
