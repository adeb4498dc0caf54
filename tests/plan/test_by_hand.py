"""What a plan names under `approximate` and a command does not carry out is refused."""

from __future__ import annotations

import pytest

from outsize.errors import OutsizeError
from outsize.train.resolve import resolve
from outsize.train.setup import BY_HAND, set_up


@pytest.mark.parametrize("name", [name for name, _ in BY_HAND])
def test_outsize_train_refuses_what_only_python_offers(name):
    resolved = resolve(None, (f"plan.approximate=[{name}]", "model=tiny"))
    with pytest.raises(OutsizeError, match=f"{name}, which `outsize train` does not carry out"):
        set_up(resolved)
