"""A model that generates within a memory budget: its weights stay in its files.

What fits beside keys, values and activations stays in memory from the first token on; the rest is
read again in every step, beside the computation. Logits are those of the whole model in memory, bit
for bit.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from tempfile import gettempdir
from types import TracebackType

import torch
from torch import Tensor

from outsize.checkpoint.hub import WEIGHT_DTYPES, describe
from outsize.decode.generate import PREFILL_TOKENS
from outsize.errors import OutsizeError, counted
from outsize.memory.sizes import format_bytes
from outsize.models.config import DecoderConfig
from outsize.runtime.tokens.cycle import Layout, layout_of, smallest
from outsize.runtime.tokens.fit import Fit, Request, fit, needs_of_rows
from outsize.runtime.tokens.reading import Reading, unbind
from outsize.runtime.tokens.source import Source
from outsize.schedule import Kind

NEAR = 0.9  # of the pool that could be had: one as large is kept for the next request


@dataclass(frozen=True)
class Outlook:
    """What is predicted of a request. weights: bytes of all of them; seconds: of one token, reading
    and computing beside each other."""

    fit: Fit
    layout: Layout
    stages: int
    weights: int
    read_rate: float
    compute_rate: float

    @property
    def seconds(self) -> float:
        return max(self.layout.read / self.read_rate, self.weights / self.compute_rate)

    def __str__(self) -> str:
        kept, read = self.layout.kept, format_bytes(self.layout.read)
        return (
            f"weights {format_bytes(self.weights)}, {kept} of {self.stages} parts stay in a pool of"
            f" {format_bytes(self.layout.pool)}; cache {format_bytes(self.fit.cache)},"
            f" a step {format_bytes(self.fit.work)}; {read} read a token at"
            f" {format_bytes(self.read_rate)}/s; predicted {self.seconds:.3g} s a token"
        )


class Streamed:
    """The model in a Hugging Face directory, of whose tensors no more than `memory` bytes are on
    the device at a time. Use it in a `with`, or close it.

    dtype None keeps that of the files. disk: the folder where weights that rest transposed or in
    another dtype are converted to, by default the system's for temporary files. sparse: weights of
    pruned models are kept there as bitmap images where that is smaller by a fifth. config: where it
    is known already. OutsizeError as of `load`, and where the folder has not the room.
    """

    def __init__(
        self,
        path: Path,
        memory: int,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        disk: str | Path | None = None,
        sparse: bool = False,
        config: DecoderConfig | None = None,
    ) -> None:
        if dtype not in (None, *WEIGHT_DTYPES):
            known = ", ".join(map(str, WEIGHT_DTYPES))
            raise OutsizeError(f"dtype = {dtype!r}, expected None or one of {known}")
        self.memory, self.device = memory, torch.device(device or "cpu")
        self.decoder = (found := describe(path, config)).model
        self.source = Source(found, dtype, Path(disk or gettempdir()), sparse)
        self.reading: Reading | None = None
        self.outlook: Outlook | None = None
        self._fits: dict[Request, Fit] = {}
        self.least = smallest(self.source)

    @property
    def config(self) -> DecoderConfig:
        return self.decoder.config

    @property
    def origin(self) -> Path | None:
        return self.decoder.origin

    def ready(self, request: Request) -> Reading:
        """What plays the steps of a request, its pool filled; `outlook` says what to expect.

        OutsizeError where the budget is too small, with what is missing.
        """
        if request not in self._fits:
            found = fit(self.decoder, self.source, self.memory, request, self.least, PREFILL_TOKENS)
            self._fits = {request: found}
        return self._with(self._fits[request])

    def timing(self) -> str:
        """Seconds of a token, predicted and measured, and what the steps read."""
        reading, outlook = self.reading, self.outlook
        assert reading is not None and outlook is not None, "asked for after a request"
        prompt, tokens = reading.seconds[Kind.PREFILL], reading.seconds[Kind.DECODE]
        said = [f"prompt {sum(prompt):.3g} s"] if prompt else []
        if tokens:
            mean = sum(tokens) / len(tokens)
            said.append(f"{mean:.3g} s a token, predicted {outlook.seconds:.3g}")
        said.append(
            f"{format_bytes(outlook.layout.read)} read in each of"
            f" {counted(len(prompt + tokens), 'step')}"
        )
        return "; ".join(said)

    def close(self) -> None:
        """Let files and memory go."""
        self._release()
        self.source.close()

    def __enter__(self) -> Streamed:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __call__(self, input_ids: Tensor) -> Tensor:
        """input_ids (B, S) or (S,), int64 -> logits (B, S, V) or (S, V), as of a Decoder. No
        gradients."""
        if input_ids.dim() not in (1, 2) or not input_ids.numel():
            raise OutsizeError(
                f"input_ids has shape {tuple(input_ids.shape)}; expected (rows, tokens) or"
                " (tokens,), of at least one token"
            )
        length = input_ids.shape[-1]
        rows = input_ids.numel() // length
        work = needs_of_rows(self.decoder, self.source, rows, length)
        left = self.memory - work - self.source.bytes_held
        if left < self.least:
            raise OutsizeError(
                f"memory of {format_bytes(self.memory)}: {counted(self.least - left, 'byte', ',')}"
                " missing for"
                f" logits of {rows} x {length} tokens; give {self.memory + self.least - left:,}"
                " bytes, or fewer tokens"
            )
        reading = self._with(Fit(0, work, left, length))
        positions = torch.arange(length, device=self.device).repeat(rows)
        bounds = tuple(range(0, rows * length + 1, length))
        logits_TV = reading.logits(input_ids.flatten().to(self.device), positions, bounds)
        return logits_TV.view(*input_ids.shape, logits_TV.shape[-1])

    def _with(self, found: Fit) -> Reading:
        """A filled pool as large as a fit allows, or nearly so."""
        whole = sum(-(-stage.bytes // 4096) * 4096 for stage in self.source.stages)
        wanted = min(found.pool, whole)
        old = None if self.reading is None else self.reading.layout
        if old is None or old.pool > found.pool or old.capacity < NEAR * wanted:
            self._release()  # before the next pool is there
            layout = layout_of(self.source, wanted)
            self.reading = Reading(self.decoder, self.source, layout, self.device)
        assert self.reading is not None
        self.reading.seconds = {Kind.PREFILL: [], Kind.DECODE: []}
        before, begin = self.source.bytes_read, time.perf_counter()
        self.reading.fill()
        spent, read = time.perf_counter() - begin, self.source.bytes_read - before
        self.outlook = self._outlook(found, self.reading, read / spent if read else None)
        return self.reading

    def _release(self) -> None:
        """Nothing of the model is a view of a pool any more."""
        if self.reading is not None:
            self.reading.close()
        self.reading = None
        unbind(self.decoder)

    def _outlook(self, found: Fit, reading: Reading, rate: float | None) -> Outlook:
        """rate None: the pool was full already, and rates are those found before."""
        past = self.outlook
        if rate is None:
            assert past is not None, "a pool that is full has been filled"
            return Outlook(
                found, reading.layout, past.stages, past.weights, past.read_rate, past.compute_rate
            )
        sizes = [stage.bytes for stage in self.source.stages]
        stages = sum(map(bool, sizes))
        return Outlook(found, reading.layout, stages, sum(sizes), rate, reading.compute_rate())
