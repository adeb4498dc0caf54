"""One vector for a text, out of what a decoder says of each of its tokens.

Directories of sentence-transformers say how (`modules.json` and the folders that it names); others
are taken by their last token, scaled to the length 1, as most decoders that embed are trained.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outsize.errors import OutsizeError
from outsize.serve.engine import Engine

LAST, MEAN, FIRST = "last token", "mean", "first token"
_MODES = {
    "pooling_mode_lasttoken": LAST,
    "pooling_mode_mean_tokens": MEAN,
    "pooling_mode_cls_token": FIRST,
}
_KINDS = {"Transformer", "Pooling", "Normalize"}


@dataclass(frozen=True)
class Pooling:
    """mode: of LAST, MEAN and FIRST; normalized: to the length 1."""

    mode: str = LAST
    normalized: bool = True

    def vector(self, engine: Engine, ids: Sequence[int], dimensions: int | None = None) -> Tensor:
        """(dimensions,) float32 of a text's tokens, all of them by default; fewer are the first
        ones, scaled anew. OutsizeError for what cannot be served."""
        kept, count = list[Tensor](), 0

        def take(h_TE: Tensor) -> None:
            nonlocal count
            count += len(h_TE)
            if self.mode == MEAN:
                kept[:] = [sum(kept, h_TE.double().sum(0))]
            elif len(h_TE) and not (kept and self.mode == FIRST):
                kept[:] = [h_TE[0 if self.mode == FIRST else -1].double()]

        engine.look(ids, True, take)
        found_E = (kept[0] / count if self.mode == MEAN else kept[0]).cpu()[:dimensions]
        if not found_E.isfinite().all():
            raise OutsizeError(
                "the model gave states for this text that are not finite; expected numbers: check"
                " its weights, or use a wider dtype"
            )
        if self.normalized or dimensions is not None:
            found_E = torch.nn.functional.normalize(found_E, dim=0)
        return found_E.float()


PLAIN = Pooling()


def pooling_in(directory: Path) -> Pooling:
    """What a directory says of it. OutsizeError for what is not there, or is done otherwise."""
    path = directory / "modules.json"
    if not path.is_file():
        return PLAIN
    modules = _read(path)
    kinds = {str(one["type"]).rsplit(".", 1)[-1]: str(one.get("path", "")) for one in modules}
    for kind in kinds:
        if kind not in _KINDS:
            raise OutsizeError(f"{path}: the module {kind} is not known; expected {_words(_KINDS)}")
    said = _read(directory / kinds["Pooling"] / "config.json") if "Pooling" in kinds else {}
    wanted = [one for one, on in said.items() if one.startswith("pooling_mode_") and on is True]
    modes = [_MODES.get(one, one) for one in wanted] or [LAST]
    if len(modes) > 1 or modes[0] not in _MODES.values():
        raise OutsizeError(
            f"{directory}: pooling by {_words(modes)} is not known; expected one of"
            f" {_words(_MODES)}"
        )
    return Pooling(modes[0], "Normalize" in kinds)


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise OutsizeError(f"{path} cannot be read: {error}") from None


def _words(names: Sequence[str] | set[str] | dict[str, str]) -> str:
    return ", ".join(sorted(names))
