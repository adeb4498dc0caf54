"""Merged tokens: a vision transformer of transformers against the maths written out token by token;
trained, saved, taken out, and what is refused."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers as hf
from float64 import Float64
from subjects import config_of
from torch import nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

import outsize
from outsize.errors import OutsizeError
from outsize.models.build import build

CLOSE = {"rtol": 1e-10, "atol": 1e-10}
SAID = {"merged": [3, 2, 0], "rank": 2, "alpha": 3.0}
MERGED = (3, 2, 0)


def vit(attention="sdpa", kind=hf.ViTForImageClassification, config=hf.ViTConfig):
    torch.manual_seed(3)
    made = config(
        hidden_size=16, num_hidden_layers=3, num_attention_heads=2, intermediate_size=24,
        image_size=12, patch_size=4, num_labels=5, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0, attn_implementation=attention,
    )  # fmt: skip
    model = kind(made).double().eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model


def images(count=2):
    return torch.randn(
        count, 3, 12, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(4)
    )


def adapted(model, **said):
    outsize.adapt(model, "pyra", **{**SAID, **said})
    torch.manual_seed(6)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = torch.randn(parameter.shape, dtype=parameter.dtype) * 0.3
    return model


def merged_tokens(own, x, keys, sizes, count, kept):
    """The tokens of one image, a list, and how many each stands for."""
    even, odd = list(range(0, len(x), 2)), list(range(1, len(x), 2))
    found = []
    for i in even:
        for j in odd:
            if i < kept or j < kept:
                continue
            a, b = keys[i].detach(), keys[j].detach()
            found.append((float(a @ b / a.norm() / b.norm()), i, j))
    best = {}
    for score, i, j in found:
        if i not in best or score > best[i][0]:
            best[i] = (score, j)
    goes = sorted(best, key=lambda i: -best[i][0])[:count]
    parts = {i: x[i] * sizes[i] for i in range(len(x))}
    pairs = torch.stack(
        [
            F.layer_norm(parts[i] + parts[best[i][1]], (16,), own["weight"], own["bias"], 1e-5)
            for i in goes
        ]
    )
    by_feature = 2 / (1 + torch.exp(-(own["a"] * pairs).sum(0)))
    total, number = dict(parts), dict(enumerate(sizes))
    for i, p in zip(goes, pairs, strict=True):
        by_token = 2 / (1 + torch.exp(-(p * own["b"][0]).sum())) - 1
        j = best[i][1]
        total[j] = total[j] + parts[i] + parts[i] * by_feature * by_token
        number[j] += sizes[i]
    places = [i for i in even if i not in goes] + odd
    if kept == 2:
        places = [0, 1, *(i for i in places if i > 1)]
    return [total[i] / number[i] for i in places], [number[i] for i in places]


def written_out(model, pixels, kept):
    """Logits of the class token, image by image; the adapter's values as they lie in the model."""
    base = model.base_model
    outputs = []
    for x in base.embeddings(pixels):
        x, sizes = list(x), [1] * len(x)
        for block, count in zip(base.layers, MERGED, strict=True):
            a, stacked = block.attention, torch.stack(x)
            h = block.layernorm_before(stacked)
            low = {n: getattr(a, n).beside for n in ("q_proj", "v_proj")}
            q, v = (
                F.linear(h, getattr(a, n).weight, getattr(a, n).bias)
                + (h @ one.a.weight.T @ one.b.weight.T) * 1.5
                for n, one in low.items()
            )
            k = F.linear(h, a.k_proj.weight, a.k_proj.bias)
            heads = []
            for part in (slice(0, 8), slice(8, 16)):
                score = q[:, part] @ k[:, part].T / 8**0.5
                weight = score.exp() * torch.tensor(sizes, dtype=score.dtype)
                heads.append(weight / weight.sum(1, keepdim=True) @ v[:, part])
            stacked = stacked + F.linear(torch.cat(heads, 1), a.o_proj.weight, a.o_proj.bias)
            x = list(stacked)
            if count:
                own = dict(block.wrapped.named_parameters())
                x, sizes = merged_tokens(own, x, (k[:, :8] + k[:, 8:]) / 2, sizes, count, kept)
            stacked = torch.stack(x)
            x = list(stacked + block.mlp(block.layernorm_after(stacked)))
        outputs.append(base.layernorm(x[0]))
    return model.classifier(torch.stack(outputs))


KINDS = {
    "vit, eager": (lambda: vit("eager"), 1),
    "vit, sdpa": (vit, 1),
    "deit": (lambda: vit("sdpa", hf.DeiTForImageClassification, hf.DeiTConfig), 2),
}


@pytest.mark.parametrize("kind", KINDS)
def test_outputs_and_gradients_are_those_of_the_maths_written_out(kind):
    make, kept = KINDS[kind]
    model = adapted(make(), kept=kept)
    pixels, labels = images(), torch.tensor([1, 3])
    own = {n: p for n, p in model.named_parameters() if p.requires_grad}
    assert len(own) == 3 * 2 * 2 + 2 * 4 and not model.classifier.weight.requires_grad
    gradients = []
    with Float64():  # transformers' own softmax too
        found = model(pixels).logits
    for logits in (found, written_out(model, pixels, kept)):
        loss = F.cross_entropy(logits, labels)
        gradients.append([logits, *torch.autograd.grad(loss, list(own.values()))])
    for found, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(found, expected, **CLOSE)
    assert all(g.abs().max() > 0 for g in gradients[0])


def test_it_begins_as_merging_alone_and_trains_as_in_a_plain_loop():
    batch = {"pixel_values": images(4), "labels": torch.tensor([1, 3, 0, 2])}
    model = outsize.adapt(vit(), "pyra", **SAID)
    before = model(**batch).logits
    with torch.no_grad():
        model.base_model.layers[0].wrapped.a.normal_()
    assert torch.equal(model(**batch).logits, before), "what they modulate by is 0 at first"
    model.classifier.requires_grad_(True)
    twin = copy.deepcopy(model)
    job = outsize.prepare(model, torch.optim.SGD(trained(model), 0.1))
    optimizer = torch.optim.SGD(trained(twin), 0.1)
    for _ in range(3):
        optimizer.zero_grad()
        loss = twin(**batch).loss
        loss.backward()
        optimizer.step()
        assert float(job.step(batch)) == pytest.approx(loss.item(), rel=1e-10)
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(one, other, **CLOSE)


def trained(model):
    return [p for p in model.parameters() if p.requires_grad]


def operations(model, pixels):
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(pixels)
    return counter.get_total_flops()


def test_it_is_kept_in_files_and_taken_out_and_saves_operations(tmp_path):
    pixels, plain = images(), vit()
    before, state = plain(pixels).logits, copy.deepcopy(plain.state_dict())
    kinds = [type(one) for one in plain.modules()]
    fewer, model = operations(plain, pixels), adapted(plain)
    logits = model(pixels).logits
    assert not torch.allclose(logits, before, rtol=1e-3)
    assert operations(model, pixels) < 0.9 * fewer
    outsize.save(model, tmp_path / "made", adapter_only=True)
    again = outsize.adapt(vit(), tmp_path / "made")
    assert torch.equal(again(pixels).logits, logits)
    assert torch.equal(copy.deepcopy(again)(pixels[:1]).logits, again(pixels[:1]).logits)
    with pytest.raises(OutsizeError, match="no weight of the model can take up"):
        outsize.merge(again)
    outsize.remove_adapter(model)
    assert [type(one) for one in model.modules()] == kinds
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert torch.equal(model(pixels).logits, before)


def test_what_is_refused():
    with pytest.raises(OutsizeError, match="a decoder predicts something at each token"):
        outsize.adapt(build(config_of("llama"), 1), "pyra")
    with pytest.raises(OutsizeError, match="a Sequential has no block of attention, layernorm"):
        outsize.adapt(nn.Sequential(nn.Linear(4, 4)), "pyra", rank=0)
    for said, words in (
        ({"merged": [1, 1, 1, 1]}, r"merged is \[1, 1, 1, 1\]; expected 1 to 3 numbers, 0 or more"),
        ({"kept": 3}, "kept is 3; expected 0, 1 or 2"),
        ({"rank": 17}, "rank: 17 is above the width 16"),
    ):
        model = vit()
        with pytest.raises(OutsizeError, match=words):
            outsize.adapt(model, "pyra", **{**SAID, **said})
        assert all(p.requires_grad for p in model.parameters())
    model = outsize.adapt(vit(), "pyra", **{**SAID, "merged": [5]})
    with pytest.raises(OutsizeError, match="block 0 merges 5 tokens and has 10, of which 4 can be"):
        model(images())
    model = outsize.adapt(vit(), "pyra", **SAID)
    with pytest.raises(OutsizeError, match="without a mask of the caller's"):
        model(images(), attention_mask=torch.tensor([[1] * 9 + [0]] * 2))
    batch = {"pixel_values": images(), "labels": torch.tensor([1, 3])}
    own = torch.optim.SGD(trained(model), 0.1)
    with pytest.raises(OutsizeError, match="not given what the one before gave"):
        outsize.prepare(model, own, blocks="vit.layers.*", recompute=("block",)).step(batch)
