"""Serial and parallel adapters: as plain hooks on a model of transformers, in and out."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
import transformers
from adapting import EAGER, pretrained, some_ids, sum_of_losses
from float64 import Float64
from subjects import CONFIGS, config_of
from torch import nn
from torch.nn import functional as F

import outsize
from outsize.checkpoint import adapters
from outsize.checkpoint.combining import combine
from outsize.errors import OutsizeError
from outsize.models.build import build
from outsize.models.families import parse
from outsize.parallel.check.decoder import Spread, check_decoder
from outsize.parallel.tensor.declared import boundaries
from outsize.parallel.tensor.units import cuts_of
from outsize.serve.export import export
from outsize.techniques.adapt.parallel_adapters import Parallel
from outsize.techniques.adapt.serial_adapters import FORMAT, Serial

CLOSE = {"rtol": 1e-10, "atol": 1e-10}
WAYS = {
    "serial": ({"size": 3}, {"size": 3, "behind": ["*.self_attn", "*.mlp"]}),
    "parallel": (
        {"size": 3, "scale": 2.5, "beside": ["mlp", "attention"]},
        {"size": 3, "scale": 2.5, "beside": ["*.mlp", "*.self_attn"]},
    ),
}


@pytest.fixture
def exactly():
    """transformers computes in float64 throughout."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    with Float64():
        yield
    torch.set_default_dtype(before)


def base(folder, family="llama"):
    facts = {k: v for k, v in CONFIGS[family].items() if k != "model_type"}
    config = transformers.AutoConfig.for_model(family, **facts)
    torch.manual_seed(5)
    model = transformers.AutoModelForCausalLM.from_config(config, **EAGER).double()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(folder)


def randomised(model):
    """The adapter's values drawn: it begins by changing nothing."""
    torch.manual_seed(6)
    for p in model.parameters():
        if p.requires_grad:
            p.data = torch.randn(p.shape, dtype=p.dtype) * 0.3
    return model


def hooked(model, values, method):
    """A model of transformers in which plain hooks do what the papers say. values: by path of a
    branch, (D, d, U, u)."""

    def hook(path):
        def change(module, args, kwargs, given):
            x = args[0] if args else kwargs["hidden_states"]
            y = given[0] if isinstance(given, tuple) else given
            d, d_bias, u, u_bias = values[path]
            if method == "serial":
                y = y + (F.gelu(y @ d.T + d_bias) @ u.T + u_bias)
            else:
                y = y + 2.5 * ((x @ d.T + d_bias).clamp(min=0) @ u.T + u_bias)
            return (y, *given[1:]) if isinstance(given, tuple) else y

        return change

    for path in values:
        model.get_submodule(path).register_forward_hook(hook(path), with_kwargs=True)
    return model


def values_of(model):
    found = {}
    for name, p in model.named_parameters():
        if ".around." in name:
            found.setdefault(name.partition(".around.")[0], []).append(p)
    return found


@pytest.mark.parametrize("method", WAYS)
def test_outputs_gradients_and_files_are_those_of_plain_hooks(method, tmp_path, exactly):
    base(tmp_path / "base")
    native, paths = WAYS[method]
    ids, plain = some_ids(), pretrained(tmp_path / "base")
    before = {name: value.clone() for name, value in plain.state_dict().items()}
    kinds = {name: type(module) for name, module in plain.named_modules()}
    logits = plain(ids).logits.detach()
    model = outsize.adapt(plain, method, **paths)
    assert torch.equal(model(ids).logits, logits), "begins as the model was"
    found = randomised(model)(ids).logits
    values = values_of(model)
    leaves = {path: [p.detach().clone().requires_grad_() for p in v] for path, v in values.items()}
    twin = hooked(pretrained(tmp_path / "base").requires_grad_(False), leaves, method)
    expected = twin(ids).logits
    assert not torch.allclose(expected, logits, rtol=1e-3), "or it does nothing"
    torch.testing.assert_close(found, expected, **CLOSE)
    for x in (found, expected):
        sum_of_losses(x, ids).backward()
    for path, own in values.items():
        for one, wanted in zip(own, leaves[path], strict=True):
            torch.testing.assert_close(one.grad, wanted.grad, **CLOSE)

    outsize.save(model, tmp_path / "made", adapter_only=True)
    ours = outsize.load(tmp_path / "base", dtype=torch.float64)
    outsize.adapt(ours, method, **native)
    names = {name for name, p in ours.named_parameters() if p.requires_grad}
    said = json.loads((tmp_path / "made" / adapters.ADAPTER_CONFIG).read_text())
    said["target_modules"] = list(ours.config.adapter.places[0].targets)
    (tmp_path / "made" / adapters.ADAPTER_CONFIG).write_text(json.dumps(said))
    ours = adapters.load(tmp_path / "made", torch.float64)
    assert {name for name, p in ours.named_parameters() if p.requires_grad} == names
    torch.testing.assert_close(ours(ids), expected, **CLOSE)
    sum_of_losses(ours(ids), ids).backward()
    sizes = sorted(float(p.grad.square().sum()) for p in ours.parameters() if p.grad is not None)
    wanted = sorted(float(p.grad.square().sum()) for v in leaves.values() for p in v)
    torch.testing.assert_close(sizes, wanted, **CLOSE)

    outsize.remove_adapter(model)
    assert kinds == {name: type(module) for name, module in model.named_modules()}
    after = model.state_dict()
    assert after.keys() == before.keys() and all(torch.equal(after[n], before[n]) for n in before)
    outsize.remove_adapter(ours)
    assert all(p.requires_grad for p in ours.parameters())
    torch.testing.assert_close(ours(ids), logits, **CLOSE)


@pytest.mark.parametrize("adapter", [Serial(3), Parallel(3, beside=("attention", "mlp"))])
def test_the_checker_passes_its_layout_and_sees_a_wrong_one(adapter):
    config = replace(config_of("gemma2"), adapter=adapter)
    cuts = cuts_of(build(config), 2, 0, True)
    own = [name for name in cuts if "_around." in name]
    assert own and all(cuts[n].partial and cuts[n].dim is None for n in own)

    def found(cuts):
        return check_decoder(config, 2, Spread(cuts, boundaries(True)))

    assert not found(cuts)
    assert found({**cuts, own[-1]: replace(cuts[own[-1]], partial=False)})


def wired():
    facts = {**CONFIGS["llama"], "ladder_from": 1}
    return build(parse(facts), seed=1)


REFUSED = {
    "no branch": (
        lambda: build(config_of("llama")), {"behind": ["mlp", "nose"]},
        "'nose' names no branch of this model; expected some of attention, mlp",
    ),
    "wired": (wired, {}, "the model has ladder_from, whose branches are summed later"),
    "module": (
        lambda: nn.Sequential(nn.Sequential(nn.Linear(4, 4))), {"behind": ["nose"]},
        "names no branch of this model; expected some of 0",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_put_there_is_refused_and_nothing_changes(name):
    make, settings, words = REFUSED[name]
    model = make()
    before = [p.requires_grad for p in model.parameters()]
    with pytest.raises(OutsizeError, match=words):
        outsize.adapt(model, "serial", **settings)
    assert before == [p.requires_grad for p in model.parameters()]


def test_a_branch_that_takes_and_gives_other_features_says_so():
    class Halves(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(4, 6), nn.Flatten(0, -2), nn.Linear(6, 4))

        def forward(self, x):
            return self.inner(x)[..., :2]

    model = nn.Sequential(Halves())
    outsize.adapt(model, "serial", size=2, behind=["0"])
    with pytest.raises(OutsizeError, match=r"a Halves takes and gives \(4, 2\) features; expected"):
        model(torch.zeros(3, 4))


def test_it_is_kept_beside_the_model_and_merged_into_nothing(tmp_path):
    model = build(config_of("llama"), seed=1)
    outsize.save(model, tmp_path / "base")
    ours = randomised(outsize.adapt(outsize.load(tmp_path / "base"), "serial", size=3))
    outsize.save(ours, tmp_path / "made", adapter_only=True)
    again = outsize.load(tmp_path / "made")
    assert torch.equal(again(some_ids()), ours(some_ids()))
    prompt = [1, 2, 3]
    assert again.generate(prompt, 4) == naive(ours, prompt, 4)
    with pytest.raises(OutsizeError, match="computes what no weight of the model can take up"):
        outsize.merge(again)
    assert torch.equal(again(some_ids()), ours(some_ids()))
    with pytest.raises(OutsizeError, match=f"peft has no method {FORMAT}"):
        export(tmp_path / "made", "peft", tmp_path / "out")
    with pytest.raises(OutsizeError, match="no weight of the model can take up"):
        export(tmp_path / "made", "hf", tmp_path / "out")
    with pytest.raises(OutsizeError, match="no weight of the model can take up"):
        combine(model, [(tmp_path / "made", 0.5)])
    assert model.config.adapter is None and not (tmp_path / "out").exists()
    said = tmp_path / "made" / adapters.ADAPTER_CONFIG
    said.write_text(json.dumps({**json.loads(said.read_text()), "size": 0}))
    with pytest.raises(OutsizeError, match="size is 0; expected a whole number above 0"):
        outsize.load(tmp_path / "made")


def naive(model, ids, count):
    """Greedy, every token from the whole of the text."""
    found = list(ids)
    for _ in range(count):
        found.append(int(model(torch.tensor([found]))[0, -1].argmax()))
    return found[len(ids) :]
