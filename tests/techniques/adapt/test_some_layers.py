"""Adapters that name some layers alone, or are of other ranks in some: peft's, and our own."""

from __future__ import annotations

from dataclasses import replace

import peft
import pytest
import torch
from adapting import pretrained, some_ids, sum_of_losses, theirs
from float64 import Float64
from plain import batches
from subjects import SEQUENCE, VOCAB, base_plan, config_of
from verifying import fill

import outsize
from outsize.checkpoint import adapters
from outsize.collectives import Mesh
from outsize.errors import OutsizeError
from outsize.models.build import build
from outsize.models.naming import OfDecoder, Several
from outsize.models.targets import read
from outsize.optim import AdamW
from outsize.plan import Pipelined
from outsize.techniques.adapt.lora import Lora
from outsize.verify import Case, Native, verify

CLOSE = {"rtol": 1e-10, "atol": 1e-10}
# What peft says of an adapter (tests/support/adapting.py), and how many Linears it changes then.
SOME = {
    "ranks": ("lora", 21, {
        "rank_pattern": {"^model.layers.1.mlp.down_proj": 5, r"layers\.1\..*": 4, "q_proj": 2},
        "alpha_pattern": {"o_proj": 7, r".*\.2\.mlp\.(up|gate)_proj": 1.5},
        "use_rslora": True,
    }),
    "layers of dora": ("dora", 7, {
        "layers_to_transform": [0, 2], "rank_pattern": {"0.self_attn.v_proj": 1},
        "exclude_modules": ["k_proj", "layers.0.self_attn.o_proj", "mlp.up_proj", "down_proj"],
    }),
    "all but": ("loha", 15, {
        "exclude_modules": r"model\.layers\.[02]\.mlp\.(up|down)_proj|.*1.*v_proj|.*1.*k_proj",
        "alpha_pattern": {"o_proj": 2},
    }),
    "of lokr": ("lokr", 7, {
        "layers_to_transform": 1, "layers_pattern": ["nose", "layers"], "rank_pattern": {"mlp.*": 5}
    }),
    "of vera": ("vera", 7, {"layers_to_transform": [2], "layers_pattern": "layers"}),
    "of ia3": ("ia3", 7, {"exclude_modules": ["layers.1.mlp.down_proj", "2.self_attn.v_proj"]}),
    "of oft": ("oft", 14, {"layers_to_transform": [1, 0]}),
}  # fmt: skip


@pytest.fixture
def exactly():
    """transformers computes in float64 throughout."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    with Float64():
        yield
    torch.set_default_dtype(before)


def norm_of_gradients(model):
    return torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()


@pytest.mark.parametrize("name", SOME)
def test_they_compute_and_are_saved_as_pefts(name, tmp_path, exactly):
    """A decoder, a class of transformers, and a base whose weights take the adapter up."""
    method, count, said = SOME[name]
    peft_model, ids = theirs(method, "llama", tmp_path, **said), some_ids()
    expected = peft_model(ids).logits
    sum_of_losses(expected, ids).backward()
    ours = adapters.load(tmp_path / "adapter", torch.float64)
    plugged = outsize.adapt(pretrained(tmp_path / "base"), tmp_path / "adapter")
    changed = [{n.split(".beside.")[0] for n, _ in one.named_parameters() if ".beside." in n}
               for one in (ours, plugged)]  # fmt: skip
    assert [len(names) for names in changed] == [count, count]
    for model, found in ((ours, ours(ids)), (plugged, plugged(ids).logits)):
        torch.testing.assert_close(found, expected, **CLOSE)
        sum_of_losses(found, ids).backward()
        torch.testing.assert_close(norm_of_gradients(model), norm_of_gradients(peft_model), **CLOSE)
    both = adapters.load(tmp_path / "base", torch.float64, adapters=[(tmp_path / "adapter", 1.0)])
    torch.testing.assert_close(both(ids), expected, **CLOSE)
    for i, model in enumerate((ours, plugged)):
        outsize.save(model, tmp_path / f"saved{i}", adapter_only=True)
        again = peft.PeftModel.from_pretrained(
            pretrained(tmp_path / "base"), tmp_path / f"saved{i}"
        )
        torch.testing.assert_close(again.eval()(ids).logits, expected, **CLOSE)
        read = adapters.load(tmp_path / f"saved{i}", torch.float64)
        torch.testing.assert_close(read(ids), expected, **CLOSE)
        assert read.config.layers == ours.config.layers
    torch.testing.assert_close(outsize.merge(plugged)(ids).logits, expected, **CLOSE)
    torch.testing.assert_close(outsize.merge(ours)(ids), expected, **CLOSE)
    assert all(layer.beside is None and not layer.idle for layer in ours.config.layers)


LATE = Several((Lora(2, targets=("blocks.2.mlp.up",)), Lora(5, 3.0, targets=("blocks.1",))))


def test_a_plan_of_them_trains_as_plain_pytorch():
    """The first stage has nothing to train."""
    made = base_plan(mesh=Mesh(tensor=2, pipeline=2), pipeline=Pipelined("1f1b"))
    data = batches(1, made.rows, SEQUENCE, VOCAB)
    config = replace(config_of("llama, untied"), adapter=LATE)
    case = Case(
        Native(config, lambda: fill), made, AdamW(1e-2, eps=1e-4), lambda step: data[step], 1, 0.5
    )
    found = verify(case, own=False)
    assert found.holds, found
    assert len(found.exact.rows) == 2 * 8


def test_targets_may_name_blocks_by_number():
    model = build(config_of("llama"), seed=1)
    for said, own in (
        ("blocks.1.self_attn", "names no linear layer"),
        ("blocks.3", "expected 0 to 2"),
        ("layers.1.self_attn.q_proj", "expected their names here: blocks.1.attention.q"),
    ):
        with pytest.raises(OutsizeError, match=own):
            outsize.adapt(model, "lora", rank=2, targets=[said])
        assert model.config == config_of("llama")
    outsize.adapt(model, "lora", rank=2, targets=["mlp.up", "blocks.[12].q", "blocks.0.mlp.down"])
    trained = {n.split(".beside.")[0] for n, p in model.named_parameters() if p.requires_grad}
    assert trained == {
        *(f"blocks.{i}.mlp.up" for i in range(3)), *(f"blocks.{i}.attention.q" for i in (1, 2)),
        "blocks.0.mlp.down",
    }  # fmt: skip
    assert adapters.to_json(model.config, None)["target_modules"] == [
        "mlp.up_proj", "model.layers.0.mlp.down_proj",
        *(f"model.layers.{i}.self_attn.q_proj" for i in (1, 2)),
    ]  # fmt: skip


WRONG = {
    "exclude_modules": ({"q_proj": 1}, "exclude_modules is {'q_proj': 1}; expected"),
    "layers_to_transform": ("1", "expected numbers of layers"),
    "layers_pattern": (["("], "layers_pattern has an entry that is no regular expression"),
    "rank_pattern": ({"q_proj": 0}, "rank_pattern: q_proj is 0; expected a whole number above 0"),
    "alpha_pattern": ({"(": 2}, "alpha_pattern has an entry that is no regular expression"),
    "target_modules": (".*q_proj", r"layers_to_transform is \[0\] beside"),
}


@pytest.mark.parametrize("key", WRONG)
def test_patterns_that_are_none_are_refused(key):
    value, words = WRONG[key]
    said = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"],
            "layers_to_transform": [0]}  # fmt: skip
    naming = OfDecoder(config_of("llama"))
    assert read(said, naming) == Lora(2, 4.0, ("blocks.0.attention.q",))
    with pytest.raises(OutsizeError, match=words):
        read({**said, key: value}, naming)
    with pytest.raises(OutsizeError, match=r"layers_to_transform \[5\], which names no weight"):
        read({**said, "layers_to_transform": [5]}, naming)
    with pytest.warns(UserWarning, match="rank_pattern has 'k_proj', which names nothing"):
        read({**said, "rank_pattern": {"k_proj": 3}}, naming)
    with pytest.raises(OutsizeError, match="layers_to_transform is 1; expected None"):
        read({**said, "peft_type": "IA3", "layers_to_transform": 1}, naming)
