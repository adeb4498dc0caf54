"""Patterns of the parameters that are trained; all others have no gradients and no states.

train: {only: blocks.*.attention}
outsize train --set "train.only=[blocks.1, '*_norm']"
"""

from __future__ import annotations

from dataclasses import dataclass

from outsize.errors import OutsizeError
from outsize.models.config import DecoderConfig
from outsize.registry import setting, technique

KEY = "train.only"


@dataclass(frozen=True)
class Only:
    """What a run trains."""

    patterns: str | tuple[str, ...] = setting(
        (), "of the parameters that are trained, as blocks.*.attention"
    )

    def __post_init__(self) -> None:
        if not self.patterns:
            raise OutsizeError(f"{KEY} names no parameter; expected a pattern, as blocks.*.mlp")

    def limited(self, config: DecoderConfig) -> DecoderConfig:
        from outsize.models.trained import only

        said = self.patterns
        return only(config, (said,) if isinstance(said, str) else said, KEY)


technique(KEY, Only, "trains what its patterns name, all else is frozen", short="patterns")
