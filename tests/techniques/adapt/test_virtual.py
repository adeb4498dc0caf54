"""Prompt and prefix tuning: peft's outputs, gradients and files, plans, rows, tokens."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import peft
import pytest
import torch
import transformers
from adapting import EAGER, pretrained, some_ids, sum_of_losses
from float64 import Float64
from plain import batches
from subjects import CONFIGS, MIXED, SEQUENCE, VOCAB, base_plan, config_of
from torch import nn
from verifying import fill

import outsize
from outsize.checkpoint import adapters
from outsize.collectives import Mesh
from outsize.data import Batch, TrainStream, ValidationStream
from outsize.data.batch import IGNORE
from outsize.data.dataset import Dataset
from outsize.decode.generate import GREEDY, Request
from outsize.errors import OutsizeError
from outsize.models.build import build
from outsize.models.layout import prompted
from outsize.models.names import adapter_layout
from outsize.optim import AdamW
from outsize.parallel.check.decoder import Spread, check_decoder
from outsize.parallel.tensor.declared import boundaries
from outsize.parallel.tensor.units import cuts_of
from outsize.plan import Pipelined, Sharding, Stage
from outsize.serve.export import export
from outsize.techniques.adapt.p_tuning import PTuning
from outsize.techniques.adapt.prefix_tuning import Prefix
from outsize.techniques.adapt.prompt_tuning import Prompt
from outsize.verify import Case, Native, verify

CLOSE = {"rtol": 1e-10, "atol": 1e-10}
COUNT = 3
THEIRS = {
    "prompt": (peft.PromptTuningConfig, {}), "prefix": (peft.PrefixTuningConfig, {}),
    "p_tuning": (peft.PromptEncoderConfig, {"encoder_hidden_size": 7}),
    "projected": (peft.PrefixTuningConfig, {"prefix_projection": True, "encoder_hidden_size": 7}),
}  # fmt: skip
OURS = {"prompt": Prompt(COUNT), "prefix": Prefix(COUNT), "p_tuning": PTuning(COUNT, 7)}


@pytest.fixture
def exactly():
    """transformers computes in float64 throughout."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    with Float64():
        yield
    torch.set_default_dtype(before)


def theirs(method, family, folder):
    """A model of transformers with peft's virtual tokens, of random values, in float64."""
    kind, said = THEIRS[method]
    facts = {k: v for k, v in CONFIGS[family].items() if k != "model_type"}
    config = transformers.AutoConfig.for_model(family, **facts)
    torch.manual_seed(5)
    model = transformers.AutoModelForCausalLM.from_config(config, **EAGER).double()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(folder / "base")
    model.name_or_path = str(folder / "base")
    made = peft.get_peft_model(
        model, kind(task_type="CAUSAL_LM", num_virtual_tokens=COUNT, **said)
    ).double()
    for parameter in made.parameters():
        if parameter.requires_grad:
            parameter.data = torch.randn(parameter.shape, dtype=torch.float64) * 0.3
    made.peft_config["default"].base_model_name_or_path = str(folder / "base")
    made.save_pretrained(folder / "adapter")
    return made.eval()


def logits_of(peft_model, ids):
    """Of the tokens themselves."""
    return peft_model(ids).logits[:, -ids.shape[1] :]


@pytest.mark.parametrize(
    ("method", "family"),
    [("prompt", "llama"), ("prompt", "gemma2"), ("prefix", "mistral"), ("prefix", "gpt2")],
)
def test_outputs_gradients_and_files_are_pefts(method, family, tmp_path, exactly):
    peft_model, ids = theirs(method, family, tmp_path), some_ids()
    ours = adapters.load(tmp_path / "adapter", torch.float64)
    expected, found = logits_of(peft_model, ids), ours(ids)
    torch.testing.assert_close(found, expected, **CLOSE)
    plain = outsize.load(tmp_path / "base", dtype=torch.float64)
    assert not torch.allclose(found, plain(ids), rtol=1e-3), "or it does nothing"
    sum_of_losses(expected, ids).backward()
    sum_of_losses(found, ids).backward()
    (wanted,) = (p.grad for p in peft_model.parameters() if p.grad is not None)
    (entry,) = adapter_layout(ours.config)
    own = dict(ours.named_parameters())
    assert {name for name, p in own.items() if p.grad is not None} == set(entry.ours)
    gradient = entry.merge(tuple(own[name].grad for name in entry.ours))[0]
    torch.testing.assert_close(gradient, wanted, **CLOSE)

    adapters.save(ours, tmp_path / "saved")
    again = peft.PeftModel.from_pretrained(pretrained(tmp_path / "base"), tmp_path / "saved")
    torch.testing.assert_close(logits_of(again.double().eval(), ids), expected, **CLOSE)
    outsize.adapt(plain, tmp_path / "saved")
    torch.testing.assert_close(plain(ids), expected, **CLOSE)
    outsize.remove_adapter(plain)
    torch.testing.assert_close(plain(ids), pretrained(tmp_path / "base")(ids).logits, **CLOSE)
    with pytest.raises(OutsizeError, match="merge: the adapter computes what no weight"):
        outsize.merge(ours)


@pytest.mark.parametrize("method", ["p_tuning", "projected"])
def test_what_pefts_networks_gave_is_read(method, tmp_path, exactly):
    peft_model, ids = theirs(method, "llama", tmp_path), some_ids()
    ours = adapters.load(tmp_path / "adapter", torch.float64)
    torch.testing.assert_close(ours(ids), logits_of(peft_model, ids), **CLOSE)


def test_an_encoder_has_pefts_outputs_and_gradients_and_is_written_as_what_it_gives(
    tmp_path, exactly
):
    peft_model, ids = theirs("p_tuning", "llama", tmp_path), some_ids()
    encoder = peft_model.prompt_encoder["default"]
    ours = outsize.load(tmp_path / "base", dtype=torch.float64)
    outsize.adapt(ours, "p_tuning", tokens=COUNT, hidden=7)
    own = [p for p in ours.parameters() if p.requires_grad]
    wanted = list(encoder.parameters())
    assert [p.shape for p in own] == [p.shape for p in wanted]
    for one, other in zip(own, wanted, strict=True):
        one.data.copy_(other.data)
    expected, found = logits_of(peft_model, ids), ours(ids)
    torch.testing.assert_close(found, expected, **CLOSE)
    for x in (expected, found):
        sum_of_losses(x, ids).backward()
    for one, other in zip(own, wanted, strict=True):
        torch.testing.assert_close(one.grad, other.grad, **CLOSE)
    outsize.save(ours, tmp_path / "made", adapter_only=True)
    again = outsize.load(tmp_path / "made", dtype=torch.float64)
    torch.testing.assert_close(again(ids), expected, **CLOSE)
    assert export(tmp_path / "made", "peft", tmp_path / "out")[1:] == []
    theirs_again = peft.PeftModel.from_pretrained(pretrained(tmp_path / "base"), tmp_path / "out")
    torch.testing.assert_close(logits_of(theirs_again.double().eval(), ids), expected, **CLOSE)


PLANS = {
    "recompute, chunks": {
        "stages": (Stage(0, 1), Stage(1, 4, ("block",)), Stage(4, 5)), "sequence_chunk": 6,
    },
    "data, all cut": {"mesh": Mesh(data=2), "shards": Sharding(2, 2, 2), "stages": MIXED},
    "tensor, by tokens, overlapped": {
        "mesh": Mesh(tensor=2), "sequence_parallel": True, "overlap": 2,
    },
    "tensor, pipeline": {"mesh": Mesh(tensor=2, pipeline=2), "pipeline": Pipelined("zb-h1")},
    "context": {"mesh": Mesh(context=2)},
}  # fmt: skip


def behind(batch):
    """The same rows, whose documents begin with tokens that are no targets."""
    wrong = batch.positions() < COUNT
    return replace(batch, targets_BS=batch.targets_BS.masked_fill(wrong, IGNORE))


@pytest.mark.parametrize(
    ("method", "plan"),
    [
        ("prefix", "recompute, chunks"),
        ("prefix", "data, all cut"), ("prompt", "tensor, by tokens, overlapped"),
        ("prefix", "tensor, by tokens, overlapped"), ("prefix", "context"),
        ("p_tuning", "tensor, pipeline"),
    ],
)  # fmt: skip
def test_a_plan_trains_as_plain_pytorch(method, plan):
    made = base_plan(**PLANS[plan])
    data = [behind(one) for one in batches(1, made.rows, SEQUENCE, VOCAB)]
    config = replace(config_of("gemma2"), adapter=OURS[method])
    case = Case(
        Native(config, lambda: fill), made, AdamW(1e-2, eps=1e-4), lambda step: data[step], 1, 0.5
    )
    found = verify(case, own=False)
    assert found.holds, found
    names = {row.name for row in found.exact.rows}
    assert names and all(".virtual." in name for name in names), "what is frozen has no gradient"


@pytest.mark.parametrize("method", OURS)
def test_the_checker_passes_its_layout_and_sees_a_wrong_one(method):
    config = replace(config_of("gemma2"), adapter=OURS[method])
    cuts = cuts_of(build(config), 2, 0, True)
    own = [name for name in cuts if ".virtual." in name]

    def found(cuts):
        return check_decoder(config, 2, Spread(cuts, boundaries(True)))

    assert own and not found(cuts)
    wrong = replace(cuts[own[0]], dim=None, spans=(), shared=2, partial=method == "prefix")
    assert found({**cuts, own[0]: wrong})


def dataset(lengths, whole=False):
    rng = np.random.default_rng(3)
    tokens = rng.integers(2, VOCAB, sum(lengths)).astype(np.uint16)
    widths = np.ones(len(tokens), dtype=np.uint32)
    ends = np.cumsum(lengths, dtype=np.int64)
    return Dataset(tokens, ends, widths, 1, len(tokens), "some", whole=whole)


@pytest.mark.parametrize("whole", [False, True])
def test_rows_have_virtual_tokens_before_every_document_and_every_target_once(whole):
    """Counted by hand: read the pieces of all rows back."""
    data = dataset([4, 9, 3, 7] if whole else [4, 30, 3, 7], whole)
    stream = TrainStream(data, 0, 1, 12, COUNT)
    said = []
    for row in range(stream.rows_per_epoch):
        batch = stream.batch(row)
        ids, targets = batch.ids_BS[0].tolist(), batch.targets_BS[0].tolist()
        for first, last in zip(batch.bounds[0], batch.bounds[0][1:], strict=False):
            own = targets[first + COUNT : last]
            assert set(targets[first : first + COUNT]) <= {IGNORE}
            if not own or IGNORE in own:
                assert set(own) <= {IGNORE}, "what is left of a row"
                continue
            assert ids[first + COUNT + 1 : last] == own[:-1]
            said.append((ids[first + COUNT], tuple(own)))
    starts = [0, *data.ends[:-1].tolist()]
    expected = []
    for start, stop in zip(starts, data.ends.tolist(), strict=True):
        text = data.tokens_N[start:stop].tolist()
        text = text if whole else [data.start, *text]
        for at in range(0, len(text) - 1, 12 - COUNT):
            part = text[at : at + 12 - COUNT + 1]
            expected.append((part[0], tuple(part[1:])))
    assert sorted(said) == sorted(expected)
    held = ValidationStream(data, 2, 12, virtual=COUNT)
    assert held.tokens == sum(len(own) for _, own in expected) == held.bytes
    with pytest.raises(OutsizeError, match="sequence is 3, and 3 virtual tokens of the adapter"):
        TrainStream(data, 0, 1, COUNT, COUNT)


@pytest.mark.parametrize(("method", "family"), [("prompt", "gpt2"), ("prefix", "gemma2")])
def test_tokens_are_those_of_the_whole_text(method, family, tmp_path):
    """Greedy, with what earlier tokens left and without; and logits of documents laid flat."""
    plain = build(config_of(family), seed=1, dtype=torch.float64)
    torch.manual_seed(3)
    for p in plain.parameters():
        p.data = torch.randn(p.shape, dtype=p.dtype) * 0.4 if p.dim() > 1 else p.data
    outsize.save(plain, tmp_path / "base")
    ours = outsize.adapt(outsize.load(tmp_path / "base"), {method: {"tokens": COUNT}}, seed=4)
    for name, p in ours.named_parameters():
        if ".virtual." in name:
            p.data.mul_(50)
    start = [1, 2, 3]
    found = ours.scored(Request(prompted(start, ours.config.virtual), 5, GREEDY, scored=True))
    text = start + found.tokens
    whole = ours(torch.tensor([text]))[0, 2:-1].log_softmax(-1)
    assert whole.argmax(-1).tolist() == found.tokens == ours.generate(start, 5)
    picked = whole.gather(1, torch.tensor(found.tokens)[:, None])[:, 0].tolist()
    assert found.logprobs == pytest.approx(picked, rel=1e-10)
    other = [5, 6]
    ids = torch.tensor(text + other)
    flat = ours.logits(ids, (0, len(text), len(ids)))
    each = torch.cat([ours(torch.tensor(one)) for one in (text, other)])
    torch.testing.assert_close(flat, each, **CLOSE)
    plain = plain(torch.tensor([text]))[0, 2:-1].log_softmax(-1)
    assert not torch.allclose(plain, whole, rtol=1e-2), "or it does nothing"


REFUSED = {
    "latent": ("deepseek_v3", {"prefix": {}}, "layers of this model have LatentAttention"),
    "none": ("llama", {"prompt": {"tokens": 0}}, "tokens"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_there_is_refused_and_nothing_changes(name):
    family, said, words = REFUSED[name]
    model = build(config_of(family))
    before = [(n, p.requires_grad) for n, p in model.named_parameters()]
    with pytest.raises(OutsizeError, match=words):
        outsize.adapt(model, said)
    assert before == [(n, p.requires_grad) for n, p in model.named_parameters()]


def test_files_of_others_and_targets_that_are_virtual_are_refused(tmp_path):
    model = build(config_of("llama"), seed=1)
    outsize.save(model, tmp_path / "base")
    ours = outsize.adapt(outsize.load(tmp_path / "base"), "prompt", tokens=COUNT)
    outsize.save(ours, tmp_path / "made", adapter_only=True)
    said = tmp_path / "made" / adapters.ADAPTER_CONFIG
    said.write_text(json.dumps({**json.loads(said.read_text()), "num_virtual_tokens": 4}))
    with pytest.raises(OutsizeError, match=r"prompt_embeddings' has shape \(3, 24\); expected \(4"):
        outsize.load(tmp_path / "made")
    with pytest.raises(OutsizeError, match="changes more than layers and branches"):
        outsize.adapt(nn.Sequential(nn.Linear(2, 2)), "prefix")
    job = outsize.prepare(ours, torch.optim.SGD(p for p in ours.parameters() if p.requires_grad))
    ids = torch.arange(8)[None]
    batch = Batch(ids, ids + 1, ((0, 8),))
    with pytest.raises(OutsizeError, match="has a target among its first 3 tokens"):
        job.step(batch)
    job.step(behind(batch))
