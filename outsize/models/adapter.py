"""The adapter seam: a model stays as it is, and small modules beside its Linears are trained.

An adapter is part of a DecoderConfig, so that whoever makes a decoder (a forecast, a worker, a
plain twin) makes it with the same modules. The frozen rest is there once: it has no gradients and
no optimizer states, and its values stay in the files that they came from.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from torch import Tensor, nn

from outsize.registry import Registry

if TYPE_CHECKING:
    from outsize.models.config import DecoderConfig


@runtime_checkable
class Adapter(Protocol):
    """What is put beside a model's Linears: the settings of a technique, or read from a file."""

    def attach(self, model: nn.Module) -> None:
        """Freeze the parameters of a whole model, and give its Linears what is beside them. Raises
        OutsizeError for a model that it cannot adapt."""

    def to_json(self, config: DecoderConfig) -> dict[str, Any]:
        """What its adapter_config.json says, as peft reads it."""


class Beside(Protocol):
    """What an adapter puts beside a Linear, a module: as a change of its weight."""

    def __call__(self, x: Tensor, /) -> Tensor:
        """x (..., d_in) -> (..., d_out), to be added to the product."""

    def change(self) -> Tensor:
        """(d_out, d_in), float32 at least: added to the weight it gives the same products."""


# By what adapter_config.json calls its peft_type: makes the adapter of such a file for a model.
FORMATS: Registry[Callable[[Mapping[str, Any], DecoderConfig], Adapter]] = Registry("adapter")
