"""Feed-forward networks whose neurons rest on disk (Alizadeh et al., "LLM in a flash", 2023).

A ReLU makes most of a layer's inner values zero, and what belongs to a zero need not be there. What
belongs to neuron i (its row of the gate and of the up projection, its column of the down
projection) rests as one bundle, one read; a window keeps those of the last tokens. Which are active
is said by a Choice:

- `Driven`, exact: the projection that ReLU acts on stays in memory and says it; the bundles hold
  the rest. Every neuron left out is multiplied by a zero.
- `Predicted`, approximate ("predicted-neurons"): everything is in the bundles, and a low-rank
  predictor says which of them matter.

The model meets this at `block.mlp`, which is replaced until the handle is closed.

T tokens, D hidden, F neurons, W of them held.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from outsize.errors import OutsizeError
from outsize.memory.predict import Predictor
from outsize.memory.rows import RowFile
from outsize.memory.window import Count, Window
from outsize.models.decoder import Decoder
from outsize.models.linear import Linear
from outsize.models.mlp import ACTIVATIONS, MLP
from outsize.models.seams import Context

PREDICTED = "predicted-neurons"  # what `approximate` must name
SLICE = 1024  # neurons bundled at a time


class Choice(Protocol):
    """Which neurons are active."""

    def __call__(self, x_TD: Tensor) -> tuple[Tensor, Tensor | None]:
        """(active_TF bool, the values that ReLU gave if they are known without the bundles)."""


@dataclass(frozen=True)
class Driven:
    """The exact choice: ReLU's input is computed in full."""

    projection: Linear

    def __call__(self, x_TD: Tensor) -> tuple[Tensor, Tensor | None]:
        driven_TF = F.relu(self.projection(x_TD))
        return driven_TF != 0, driven_TF


@dataclass(frozen=True)
class Predicted:
    """The approximate choice."""

    predictor: Predictor

    def __call__(self, x_TD: Tensor) -> tuple[Tensor, Tensor | None]:
        return self.predictor(x_TD), None


class Bundles:
    """How the projections of an MLP lie in rows: what rests of gate and up, then down's column."""

    def __init__(self, mlp: MLP, choice: Choice) -> None:
        driver = mlp.up if mlp.gate is None else mlp.gate
        inner = [x for x in (mlp.gate, mlp.up) if x is not None]
        self.inner = [x for x in inner if not (isinstance(choice, Driven) and x is driver)]
        self.down, weight = mlp.down, mlp.down.weight
        self.dtype, (self.hidden, self.neurons) = weight.dtype, weight.shape
        self.columns = (len(self.inner) + 1) * self.hidden
        self.nbytes = self.columns * self.dtype.itemsize

    def parts(self, rows: Tensor) -> tuple[Tensor, ...]:
        """Rows of bytes (W, stride) as matrices (W, D), one a projection."""
        content = rows[:, : self.nbytes].view(self.dtype)
        return tuple(
            content[:, at : at + self.hidden] for at in range(0, self.columns, self.hidden)
        )

    def write(self, file: RowFile, base: int) -> None:
        """All neurons to rows `base` and after."""
        buffer = file.buffer(min(SLICE, self.neurons))
        for start in range(0, self.neurons, SLICE):
            rows = buffer[: self.neurons - start]
            for part, weight_FD in zip(self.parts(rows), self._weights(), strict=True):
                part.copy_(weight_FD[start : start + SLICE])
            file.write(base + start, rows)

    def read(self, file: RowFile, base: int) -> None:
        """The other way."""
        buffer = file.buffer(min(SLICE, self.neurons))
        for start in range(0, self.neurons, SLICE):
            rows = buffer[: self.neurons - start]
            file.read(torch.arange(base + start, base + start + len(rows)), rows)
            for part, weight_FD in zip(self.parts(rows), self._weights(), strict=True):
                weight_FD[start : start + SLICE].copy_(part)

    def release(self) -> None:
        """Let the memory of what is in the file go."""
        for linear in (*self.inner, self.down):
            linear.weight.data = linear.weight.data.new_empty(0)

    def allocate(self) -> None:
        """Memory for it again."""
        for linear in self.inner:
            linear.weight.data = linear.weight.data.new_empty(self.neurons, self.hidden)
        self.down.weight.data = self.down.weight.data.new_empty(self.hidden, self.neurons)

    def _weights(self) -> list[Tensor]:
        return [*(x.weight.detach() for x in self.inner), self.down.weight.detach().t()]


class FlashMLP(nn.Module):
    """x_TD -> y_TD, as the MLP that it stands for; no gradients."""

    def __init__(self, bundles: Bundles, choose: Choice, window: Window) -> None:
        super().__init__()
        self.bundles, self.choose, self.window = bundles, choose, window

    @torch.no_grad()
    def forward(self, x_TD: Tensor, ctx: Context | None = None) -> Tensor:
        active_TF, driven_TF = self.choose(x_TD)
        bias_D = self.bundles.down.bias
        y_TD = torch.zeros_like(x_TD) if bias_D is None else bias_D.expand_as(x_TD).clone()
        for ids_W, rows in self.window.hold(active_TF):
            *inner, down_WD = self.bundles.parts(rows)
            values_TW = self._values(x_TD, driven_TF, ids_W, inner)
            y_TD.addmm_(values_TW, down_WD)
        return y_TD

    def _values(
        self, x_TD: Tensor, driven_TF: Tensor | None, ids_W: Tensor, inner: Sequence[Tensor]
    ) -> Tensor:
        """The inner values of the held neurons: ReLU's, times the up projection's if gated."""
        linears = zip(self.bundles.inner, inner, strict=True)
        found = [
            F.linear(x_TD, w_WD, None if of.bias is None else of.bias[ids_W])
            for of, w_WD in linears
        ]
        first_TW = F.relu(found.pop(0)) if driven_TF is None else driven_TF[:, ids_W]
        return first_TW * found[0] if found else first_TW


class Flash:
    """The handle of a model whose neurons rest on disk: close it, or leave its `with`, and the
    model is as it was, its weights read back."""

    def __init__(self, model: Decoder, file: RowFile) -> None:
        self._model, self._file = model, file
        self._replaced: list[tuple[nn.Module, nn.Module, FlashMLP]] = []

    def replace(self, block: nn.Module, choice: Choice, capacity: int, span: int) -> None:
        """Put the next block's neurons into the file."""
        mlp, base = block.mlp, len(self._replaced)
        assert isinstance(mlp, MLP)
        bundles = Bundles(mlp, choice)
        base *= bundles.neurons
        bundles.write(self._file, base)
        window = Window(self._file, base, bundles.neurons, capacity, span)
        bundles.release()
        block.mlp = FlashMLP(bundles, choice, window)
        self._replaced.append((block, mlp, block.mlp))

    @property
    def count(self) -> Count:
        """What all layers' windows did; tokens are counted once."""
        counts = [flash.window.count for *_, flash in self._replaced]
        tokens = max((c.tokens for c in counts), default=0)
        wanted, hits = sum(c.wanted for c in counts), sum(c.hits for c in counts)
        return Count(tokens, wanted, hits, sum(c.bytes_read for c in counts))

    @property
    def layer_bytes(self) -> int:
        """Bytes of all bundles of all layers: what reading whole layers would move a token."""
        return sum(f.bundles.neurons * f.bundles.nbytes for *_, f in self._replaced)

    def close(self) -> None:
        """Give the weights back to the model. Raises OutsizeError where they cannot be read."""
        for index, (block, mlp, flash) in enumerate(self._replaced):
            flash.bundles.allocate()
            flash.bundles.read(self._file, index * flash.bundles.neurons)
            block.mlp = mlp
        self._replaced.clear()
        self._file.close()

    def __enter__(self) -> Flash:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def flash_mlp(
    model: Decoder,
    folder: Path,
    window: int = 5,
    share: float = 0.5,
    predictors: Sequence[Predictor] | None = None,
    approximate: Collection[str] = (),
) -> Flash:
    """Move the neurons of a ReLU model on the CPU to a file under `folder`.

    window: tokens whose neurons stay; share: part of a layer's neurons that there is memory for.
    predictors: one a layer (outsize/memory/predict.py), only with "predicted-neurons" in
    `approximate`; without them every output is that of the model itself, up to the order of sums.
    Memory of weights that are views of a larger buffer is not freed.

    Raises OutsizeError for a model without ReLU or with experts, not on the CPU, and for a folder
    without room.
    """
    mlps = [_checked(block.mlp, index) for index, block in enumerate(model.blocks)]
    choices = _choices(mlps, predictors, approximate)
    if window < 1 or not 0 < share <= 1:
        raise OutsizeError(
            f"window = {window}, share = {share}; expected a window of 1 token or more and a share "
            "of a layer's neurons above 0 and up to 1"
        )
    shapes = [Bundles(mlp, choice) for mlp, choice in zip(mlps, choices, strict=True)]
    neurons = shapes[0].neurons
    file = RowFile(folder, neurons * len(mlps), max(shape.nbytes for shape in shapes))
    flash = Flash(model, file)
    try:
        for block, choice in zip(model.blocks, choices, strict=True):
            flash.replace(block, choice, max(1, int(share * neurons)), window)
    except BaseException:
        flash.close()
        raise
    return flash


def _checked(mlp: Tensor | nn.Module, index: int) -> MLP:
    if not isinstance(mlp, MLP) or mlp.activation is not ACTIVATIONS["relu"]:
        raise OutsizeError(
            f"block {index} has no ReLU network, so no neuron of it is ever exactly zero; neurons "
            'on disk need one with "relu" as its activation, such as OPT or a ReLU-fied Llama'
        )
    if mlp.down.weight.device.type != "cpu":
        raise OutsizeError(
            f"block {index} is on {mlp.down.weight.device}; neurons on disk run on the CPU: move "
            "the model there"
        )
    return mlp


def _choices(
    mlps: Sequence[MLP], predictors: Sequence[Predictor] | None, approximate: Collection[str]
) -> list[Choice]:
    if predictors is None and PREDICTED not in approximate:
        return [Driven(mlp.up if mlp.gate is None else mlp.gate) for mlp in mlps]
    if predictors is None or PREDICTED not in approximate:
        raise OutsizeError(
            f"predictors = {'none' if predictors is None else len(predictors)}, approximate = "
            f"{sorted(approximate)}; predictors leave out neurons that matter a little: give them "
            f"together with approximate={{{PREDICTED!r}}}, or neither"
        )
    if len(predictors) != len(mlps):
        raise OutsizeError(
            f"{len(predictors)} predictors for {len(mlps)} layers; fit one for each layer"
        )
    return [Predicted(predictor) for predictor in predictors]
