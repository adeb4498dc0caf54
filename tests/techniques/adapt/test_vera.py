"""VeRA's projections: one pair for all weights, as peft draws them, in files once."""

from __future__ import annotations

import json
import math

import pytest
import torch
from adapting import theirs
from subjects import config_of

import outsize
from outsize.checkpoint import adapters
from outsize.errors import OutsizeError
from outsize.models.build import build
from outsize.models.names import adapter_layout


def parts(model, leaf):
    """A or B of each weight, by name."""
    named = model.named_parameters()
    return {n: p.detach() for n, p in named if n.endswith(f".beside.{leaf}.weight")}


def test_every_weight_has_the_first_rows_and_columns_of_one_pair():
    model = outsize.adapt(build(config_of("llama"), seed=1), "vera", rank=6, targets=["all-linear"])
    for leaf, fan in (("a", 40), ("b", 6)):
        every = parts(model, leaf)
        whole = max(every.values(), key=torch.Tensor.numel)
        assert len(every) == 3 * 7 and len({p.shape for p in every.values()}) > 1
        for name, part in every.items():
            assert torch.equal(part, whole[tuple(map(slice, part.shape))]), name
        assert 0.95 * math.sqrt(6 / fan) < whole.abs().max() < math.sqrt(6 / fan)
        assert not torch.equal(whole[0], whole[1])
    a, b = (max(parts(model, leaf).values(), key=torch.Tensor.numel).flatten() for leaf in "ab")
    ratio = a[: b.numel()] / b[: a.numel()] if a.numel() < b.numel() else a[: b.numel()] / b
    assert ratio.std() > 0.1, "each is drawn for itself"
    again = outsize.adapt(
        build(config_of("llama"), seed=2), "vera", seed=1, rank=6, targets=["mlp.down"]
    )
    assert not torch.equal(parts(again, "a").popitem()[1], whole), "drawn by the seed"
    stays = [p for n, p in model.named_parameters() if n in parts(model, "a") | parts(model, "b")]
    assert not any(p.requires_grad for p in stays), "and never trained"
    stored = [entry.theirs[0] for entry in adapter_layout(model.config)]
    assert stored.count("base_model.vera_A") == stored.count("base_model.vera_B") == 1


def test_they_are_as_large_as_pefts_and_read_from_its_files(tmp_path):
    peft_model = theirs("vera", "llama", tmp_path)
    drawn = peft_model.base_model.vera_A["default"], peft_model.base_model.vera_B["default"]
    model = adapters.load(tmp_path / "adapter", torch.float64)
    own = outsize.load(tmp_path / "base")
    outsize.adapt(own, "vera", rank=5, targets=["all-linear"])
    for leaf, wanted in zip("ab", drawn, strict=True):
        for part in parts(model, leaf).values():
            assert torch.equal(part.float(), wanted[tuple(map(slice, part.shape))].float())
        whole = max(parts(own, leaf).values(), key=torch.Tensor.numel)
        assert whole.shape == wanted.shape
        assert float(whole.abs().max()) == pytest.approx(float(wanted.abs().max()), rel=0.05)


@pytest.mark.parametrize(
    ("change", "words"),
    [({"save_projection": False}, "save_projection is False; expected True"),
     ({"r": 6}, r"vera_lambda_d' has shape \(5,\); expected \(6,\)")],
)  # fmt: skip
def test_files_without_them_or_of_another_rank_are_refused(change, words, tmp_path):
    theirs("vera", "llama", tmp_path)
    file = tmp_path / "adapter" / adapters.ADAPTER_CONFIG
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    with pytest.raises(OutsizeError, match=words):
        adapters.load(tmp_path / "adapter")
