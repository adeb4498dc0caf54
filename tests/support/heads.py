"""What goes through a model's head."""

from __future__ import annotations

import pytest
from torch import Tensor

from outsize.models.decoder import Epilogue


def watched(patch: pytest.MonkeyPatch) -> list[int]:
    """The tokens of each product of a head from now on, whoever makes it."""
    seen, plain = list[int](), Epilogue.logits

    def logits(self: Epilogue, h_TD: Tensor) -> Tensor:
        seen.append(len(h_TD))
        return plain(self, h_TD)

    patch.setattr(Epilogue, "logits", logits)
    return seen
