"""Factors on the learning rate by patterns of parameters; those of several patterns multiply.

optimizer: {rates: ["prologue=0.1", "*_norm=3"]}
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from outsize.errors import OutsizeError
from outsize.models.config import DecoderConfig
from outsize.models.patterns import refuse_idle
from outsize.registry import setting, technique

KEY = "optimizer.rates"


@dataclass(frozen=True)
class Rates:
    """What a run says of the learning rates of parts of a model."""

    factors: str | tuple[str, ...] = setting((), "on the learning rate, each as PATTERN=FACTOR")

    def __post_init__(self) -> None:
        if not self.rates:
            raise OutsizeError(f"{KEY} is empty; expected factors, each as PATTERN=FACTOR")

    @property
    def rates(self) -> Mapping[str, float]:
        found = dict[str, float]()
        said = (self.factors,) if isinstance(self.factors, str) else self.factors
        for pattern, factor in map(_read, said):
            if pattern in found:
                raise OutsizeError(
                    f"{KEY}: {pattern!r} has the factors {found[pattern]:g} and {factor:g};"
                    " expected one for each pattern"
                )
            found[pattern] = factor
        return found

    def limited(self, config: DecoderConfig) -> DecoderConfig:
        from outsize.models.trained import trained_names

        refuse_idle(self.rates, trained_names(config), KEY)
        return config


def _read(said: str) -> tuple[str, float]:
    pattern, _, text = said.rpartition("=")
    try:
        factor = float(text)
    except ValueError:
        factor = math.nan
    if not pattern or not 0 <= factor < math.inf:
        raise OutsizeError(f"{KEY}: {said!r}; expected PATTERN=FACTOR, a number of 0 or more")
    return pattern, factor


technique(KEY, Rates, "factors on the learning rate by patterns of parameters", short="factors")
