"""The canonical form of strides, and strided messages both ways."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from outsize.collectives.strided import Layout, Model, layout, parse_model
from outsize.errors import OutsizeError


@given(st.data())
def test_runs_visit_every_element_in_order(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    x = torch.arange(4**4 * 16).view(8, 8, 8, 8)
    for dim, size in enumerate(shape):
        step = data.draw(st.integers(1, 2))
        x = x.narrow(dim, data.draw(st.integers(0, 8 - size * step)), size * step)
        x = x[(slice(None),) * dim + (slice(None, None, step),)]
    x = x.permute(data.draw(st.permutations(range(4))))
    form = layout(x.shape, x.stride())
    base = torch.arange(4**4 * 16)
    runs = [base[x.storage_offset() + s :][: form.run] for s in form.starts()]
    assert torch.equal(torch.cat(runs), x.reshape(-1))


def test_equal_layouts_written_differently_look_alike() -> None:
    x = torch.zeros(6, 4, 10)
    assert layout(x.shape, x.stride()) == Layout(240, ())
    assert layout(x[:, :, :5].shape, x[:, :, :5].stride()) == Layout(5, ((24, 10),))
    columns = x.view(24, 10)[:, None, :5]
    assert layout(columns.shape, columns.stride()) == Layout(5, ((24, 10),))
    assert layout(x[::2].shape, x[::2].stride()) == Layout(40, ((3, 80),))
    assert layout((3, 0), (1, 1)) == Layout(0, ())
    assert layout((), ()) == Layout(1, ())


# 10 us a message, 5 GB/s on the way; 2 us and 5 GB/s for one of many; packing at 1 to 10 GB/s
EACH = tuple((run, 2e-6 + run * 2e-10) for run in (64, 4096, 1 << 20))
MODEL = Model(1e-5, 2e-10, EACH, ((64, 1e-9), (1 << 20, 1e-10)))


def test_the_model_adds_up_its_figures() -> None:
    short, long = Layout(16, ((1000, 32),)), Layout(1 << 20, ((3, 1 << 21),))
    assert MODEL.seconds("blocks", short, 4) == pytest.approx(1e-5 + 1000 * (2e-6 + 64 * 2e-10))
    assert MODEL.seconds("pack", short, 4) == pytest.approx(1e-5 + 64000 * (2e-10 + 2e-9))
    assert MODEL.seconds("blocks", long, 4) == pytest.approx(1e-5 + 3 * (2e-6 + (4 << 20) * 2e-10))
    assert MODEL.seconds("pack", long, 4) == pytest.approx(1e-5 + (12 << 20) * (2e-10 + 2e-10))
    assert (MODEL.way(short, 4), MODEL.way(long, 4)) == ("pack", "blocks")
    assert parse_model(MODEL.text()) == MODEL
    with pytest.raises(OutsizeError, match="cannot be read"):
        parse_model("{}")
