"""How often experts of several workers have the computing thread wait for the device. In a step:
test_training.py."""

from __future__ import annotations

from collections.abc import Sequence

import strict
import torch

from outsize.collectives.collective import Alone
from outsize.models.experts import LocalDispatch
from outsize.techniques.axes.expert import Exchanged


class Doubling:
    """Four experts, which double."""

    every = count = 4

    def __call__(self, x_ND: torch.Tensor, sizes: Sequence[int] | torch.Tensor) -> torch.Tensor:
        assert len(sizes) == self.count
        return x_ND * 2


def test_tokens_wait_once_a_layer_where_experts_are_of_several_workers() -> None:
    """For how many rows go and come, together; where all experts are here they do not."""
    strict.start("demand")
    chosen_TJ = torch.tensor([[0, 2], [3, 1], [2, 3]], device="strict")
    weight_TJ = torch.rand(3, 2, dtype=torch.float64, device="strict")
    x_TD = torch.rand(3, 5, dtype=torch.float64, device="strict", requires_grad=True)
    for dispatch, waits in ((LocalDispatch(), 0), (Exchanged(Alone()), 1)):
        with strict.waits() as counted:
            y_TD = dispatch(x_TD, chosen_TJ, weight_TJ, Doubling())
            y_TD.sum().backward()
        assert sum(counted.values()) == waits, counted
        expected = 2 * x_TD * weight_TJ.sum(1, keepdim=True)
        assert torch.allclose(y_TD, expected, rtol=1e-12)
