"""Hugging Face classes in chunks of the sequence, their logits in chunks of tokens: the numbers of
a plain loop, in less memory, as predicted; what cannot run like that is refused."""

from __future__ import annotations

import copy
import re
from functools import cache

import pytest
import torch
import transformers as hf
from torch import nn
from torch.nn import functional as F

from outsize.errors import OutsizeError
from outsize.train.prepare import prepare

VOCAB, ROWS, TOKENS = 40, 2, 23
SIZES = {"hidden_size": 24, "num_hidden_layers": 2, "vocab_size": VOCAB, "num_attention_heads": 2}
LLAMA = {**SIZES, "intermediate_size": 32, "num_key_value_heads": 1}
IN_CHUNKS = {"recompute": ["block"], "sequence_chunk": 7, "loss_chunk": 9}


def llama(**changes):
    return hf.LlamaForCausalLM(hf.LlamaConfig(**{**LLAMA, **changes}))


def gpt2(dropout: float = 0.0):
    config = hf.GPT2Config(
        n_embd=24, n_layer=2, n_head=2, vocab_size=VOCAB, n_positions=64, resid_pdrop=dropout,
        embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return hf.GPT2LMHeadModel(config)


MODELS = {
    "llama": llama,
    "gpt2": gpt2,
    "windows": lambda: hf.MistralForCausalLM(hf.MistralConfig(**LLAMA, sliding_window=5)),
    "experts": lambda: hf.MixtralForCausalLM(
        hf.MixtralConfig(
            **LLAMA, num_local_experts=3, sliding_window=None, experts_implementation="eager"
        )
    ),
    "norms of heads": lambda: hf.Qwen3ForCausalLM(hf.Qwen3Config(**LLAMA, head_dim=12)),
}


def sample(seed: int, padded: bool = False):
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCAB, (ROWS, TOKENS), generator=g)
    batch = {"input_ids": ids, "labels": ids.clone(), "use_cache": False}
    batch["labels"][0, :6] = -100  # a prompt: no targets
    if padded:
        batch["attention_mask"] = torch.ones_like(ids)
        batch["attention_mask"][1, 17:] = 0
        batch["labels"][1, 17:] = -100
    return batch


def own(output, batch):
    """That of the class, which takes logits to float32."""
    return output.loss


def mean(output, batch):
    logits, labels = output.logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten()
    return F.cross_entropy(logits, labels)


def smoothed(output, batch):
    """A token of one's own for no target, smoothing."""
    logits = output.logits[:, :-1].flatten(0, 1)
    labels = batch["labels"][:, 1:].flatten()
    labels = labels.masked_fill(labels == -100, 7)
    return F.cross_entropy(logits, labels, ignore_index=7, label_smoothing=0.1)


def weighted(output, batch):
    """A sum of losses with weights, of somebody's own."""
    logits, labels = output.logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten()
    each = F.cross_entropy(logits, labels, reduction="none")
    return (each * torch.linspace(0.5, 2, len(each), dtype=torch.float64)).sum() / 40


def capped(output, batch):
    """Logits with a cap, as Gemma's, classes with weights, smoothing, and a z-loss."""
    logits = (output.logits[:, :-1] / 3).tanh() * 3
    labels, weight = batch["labels"][:, 1:].flatten(), torch.linspace(0.5, 2, VOCAB).double()
    entropy = F.cross_entropy(logits.flatten(0, 1), labels, weight, label_smoothing=0.1)
    return entropy + 1e-2 * logits.logsumexp(-1).square().mean()


def preferred(output, batch):
    """The first row's answer before the second's, as in direct preference optimisation."""
    chosen = output.logits[:, :-1].log_softmax(-1)
    said = batch["input_ids"][:, 1:].unsqueeze(-1)
    each = torch.gather(chosen, 2, said).squeeze(-1).sum(-1)
    return -F.logsigmoid(0.1 * (each[0] - each[1]))


def trained(model, loss, data, **options):
    """Losses and weights of a job's steps."""
    model = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    job = prepare(model, optimizer, loss=loss, **options)
    losses = [float(job.step(batch)) for batch in data]
    return losses, dict(model.named_parameters()), job


def plainly(model, loss, data):
    model, losses = copy.deepcopy(model), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for batch in data:
        optimizer.zero_grad()
        found = loss(model(**batch), batch)
        found.backward()
        optimizer.step()
        losses.append(float(found.detach()))
    return losses, dict(model.named_parameters())


def check(model, loss, data, **options):
    near = 1e-6 if loss is own else 1e-10
    losses, weights = plainly(model, loss, data)
    found, got, job = trained(model, loss, data, **options)
    assert found == pytest.approx(losses, rel=near)
    for name, weight in weights.items():
        far = (got[name] - weight).detach().abs().max()
        assert float(far) <= near * float(weight.detach().abs().max().clamp(min=1e-3)), name
    return job


CASES = {
    **{name: (name, mean, False, IN_CHUNKS) for name in MODELS},
    "the class's own loss": ("gpt2", own, False, IN_CHUNKS),
    "padded": ("llama", mean, True, IN_CHUNKS),
    "smoothed": ("llama", smoothed, False, IN_CHUNKS),
    "weighted": ("llama", weighted, False, IN_CHUNKS),
    "preferred": ("llama", preferred, False, IN_CHUNKS),
    "capped": ("gpt2", capped, False, {"loss_chunk": 5}),
    "logits alone": ("gpt2", mean, False, {"loss_chunk": 5}),
    "blocks alone": ("llama", mean, True, {"recompute": ["block"], "sequence_chunk": 11}),
}


@pytest.mark.parametrize("name", CASES)
def test_a_plain_loop_s_numbers(name):
    which, loss, padded, options = CASES[name]
    torch.manual_seed(1)
    model = MODELS[which]().double().train()
    steps = 2 if name in ("llama", "capped") else 1
    job = check(model, loss, [sample(seed, padded) for seed in range(steps)], **options)
    assert job.plan.sequence_chunk == options.get("sequence_chunk", 0)


def test_frozen_blocks_and_an_evaluation():
    torch.manual_seed(1)
    model = llama().double().train()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("layers.0" not in name and "embed" not in name)
    job = check(model, mean, [sample(0), sample(1)], **IN_CHUNKS)
    expected = float(mean(job.model(**sample(2)), sample(2)))
    total, count = job.evaluate(sample(2))
    assert total / count == pytest.approx(expected, rel=1e-10)


LONG = 256  # tokens of a row, of which the logits alone take half a MiB


@cache
def peak(**options):
    """Measured and predicted, of a step."""
    torch.manual_seed(1)
    model = llama(vocab_size=512)
    job = prepare(model, "adamw", "64MiB", recompute=["block"], **options)
    ids = torch.randint(3, 512, (1, LONG), generator=torch.Generator().manual_seed(0))
    job.step({"input_ids": ids, "labels": ids, "use_cache": False})
    found = max(event.peak for event in job.report.trace.events)
    assert 0.95 * job.forecast.peak <= found <= job.forecast.peak
    return found


def test_less_memory_as_predicted():
    """PyTorch's cross-entropy has the logits more than once."""
    whole, logits, both = peak(), peak(loss_chunk=16), peak(loss_chunk=16, sequence_chunk=64)
    assert whole - logits > 2 * LONG * 512 * 4
    assert logits - both > LONG * (24 + 2 * 32) * 4  # of a block: hidden states and two of its MLP


def test_logits_are_there_once():
    """They become their gradient in place, where the class computes with float32."""
    few, many = peak(loss_chunk=16), peak(loss_chunk=128)
    assert many - few < 1.5 * (128 - 16) * 512 * 4


def test_the_pass_of_single_precision():
    torch.manual_seed(1)
    model = llama().train()
    before = dict(model.named_parameters())
    _, whole, _ = trained(model, own, [sample(0)])
    _, chunks, _ = trained(model, own, [sample(0)], loss_chunk=9)
    for name, weight in whole.items():
        moved = (weight - before[name]).detach()
        far = (chunks[name] - weight).detach().abs().max()
        assert float(far) <= 1e-3 * float(moved.abs().max()), name


def test_a_target_that_is_no_token_is_refused():
    torch.manual_seed(1)
    job = prepare(llama(), "adamw", loss_chunk=9, loss=mean)
    batch = sample(0)
    batch["labels"][1, 5] = VOCAB
    with pytest.raises(OutsizeError, match="target 40 is no token of a vocabulary of 40"):
        job.step(batch)


def test_a_budget_alone_asks_for_chunks():
    """Where nothing else fits; the numbers stay those of a plain loop."""
    torch.manual_seed(1)
    model = llama(vocab_size=512).double().train()
    ids = torch.randint(3, 512, (1, LONG), generator=torch.Generator().manual_seed(0))
    data = [{"input_ids": ids, "labels": ids, "use_cache": False}]
    again = {"recompute": ["block"]}
    with pytest.raises(OutsizeError, match="missing") as caught:
        trained(model, mean, data, memory="800KiB", sequence_chunk=0, loss_chunk=0, **again)
    least = 800 * 1024 + int(re.search(r"(\d+) bytes? missing", str(caught.value))[1])
    job = check(model, mean, data, memory=least - 1, **again)
    assert job.plan.sequence_chunk and job.plan.loss_chunk
    assert job.report.trace.peak() <= job.forecast.peak < least


class Reading(nn.Module):
    """Blocks that see the tokens behind them."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True) for _ in range(2)
        )

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


REFUSED = {
    "reads on": (lambda: Reading(), {"sequence_chunk": 7}, "'layers.0' cannot run in chunks"),
    "dropout": (lambda: gpt2(0.1), {"sequence_chunk": 7}, "draws random numbers"),
    "eager": (
        lambda: llama(attn_implementation="eager"), {"sequence_chunk": 7}, "first tokens, .* fail",
    ),
    "one token": (llama, {"sequence_chunk": 1}, "set it to 2 or more"),
    "no logits": (lambda: Reading(), {"loss_chunk": 4}, "nothing would be done"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_is_refused_in_a_line(name):
    make, options, said = REFUSED[name]
    torch.manual_seed(1)
    model = make().train()
    recompute = ["block"] if "sequence_chunk" in options else None
    job = prepare(model, "sgd", recompute=recompute, **options)
    batch = torch.randn(2, 20, 8) if isinstance(model, Reading) else sample(0)
    with pytest.raises(OutsizeError, match=said) as caught:
        job.step(batch)
    assert "\n" not in str(caught.value)
