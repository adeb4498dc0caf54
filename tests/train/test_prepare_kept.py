"""States of a prepared job: in a dictionary, in files, in the optimizer that was handed in."""

from __future__ import annotations

import copy

import pytest
import torch
from normalised import Net, batches, loss
from torch import nn

import outsize
from outsize import OutsizeError
from outsize.models.build import build
from outsize.models.families import parse


def job_of(model: nn.Module, **more):
    return outsize.prepare(model, torch.optim.AdamW(model.parameters(), 1e-2), loss=loss, **more)


@pytest.mark.parametrize("way", ["dictionary", "files"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_going_on_gives_the_same_numbers(tmp_path, way, when) -> None:
    torch.manual_seed(0)
    model, given = Net().double(), batches(6)
    whole = job_of(copy.deepcopy(model))
    want = [float(whole.step(b)) for b in given]
    first = job_of(copy.deepcopy(model))
    for b in given[:3]:
        first.step(b)
    torch.manual_seed(5)
    again = job_of(Net().double(), microbatches=1)
    if when == "after":
        again.step(given[5])
    if way == "files":
        assert first.save(tmp_path / "kept") == tmp_path / "kept" / "step-00000003"
        again.load(tmp_path / "kept")
    else:
        state = first.state_dict()
        first.step(given[5])  # what it gave are copies
        again.load_state_dict(state)
    assert [float(again.step(b)) for b in given[3:]] == want[3:]
    assert again.state_dict()["steps"] == 6
    for name, value in again.model.named_buffers():
        assert torch.equal(value, dict(whole.model.named_buffers())[name]), name


def test_a_native_decoder_is_saved_as_one(tmp_path) -> None:
    config = {
        "model_type": "llama", "hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 97,
        "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 48,
        "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "hidden_act": "silu",
    }  # fmt: skip
    model, ids = build(parse(config), 0), torch.randint(0, 97, (2, 16))
    model.words = tmp_path  # as of a model that was loaded
    (tmp_path / "tokenizer.json").write_text("{}")
    job = outsize.prepare(model, "adamw")
    job.step(ids)
    assert (job.save(tmp_path / "kept") / "tokenizer.json").read_text() == "{}"
    loaded = outsize.load(tmp_path / "kept")
    for name, value in job.weights():
        assert torch.equal(dict(loaded.named_parameters())[name], value), name
    again = outsize.prepare(build(parse(config), 1), "adamw", "64MiB")
    again.load(tmp_path / "kept")
    assert float(again.step(ids)) == pytest.approx(float(job.step(ids)), rel=1e-6)


@pytest.mark.parametrize("memory", [None, "1MiB"])
def test_the_optimizer_that_was_handed_in_has_its_states(memory) -> None:
    torch.manual_seed(0)
    model, given = Net().double(), batches(3)
    twin = copy.deepcopy(model)
    want = torch.optim.AdamW(twin.parameters(), 1e-2)
    have = torch.optim.AdamW(model.parameters(), 1e-2)
    job = outsize.prepare(model, have, memory, loss=loss)
    for b in given:
        job.step(b)
        want.zero_grad()
        loss(twin(b[0]), b).backward()
        want.step()
    for mine, plain in zip(model.parameters(), twin.parameters(), strict=True):
        for key, value in want.state[plain].items():
            assert torch.allclose(have.state[mine][key].double(), value.double(), atol=1e-12), key
    assert have.state_dict()["state"].keys() == want.state_dict()["state"].keys()
    fresh = torch.optim.AdamW(twin.parameters(), 1e-2)
    fresh.load_state_dict(have.state_dict())
    assert float(fresh.state[next(iter(twin.parameters()))]["step"]) == 3


def test_states_of_another_model_are_refused(tmp_path) -> None:
    given, wide = batches(1)[0], Net(6).double()
    wide.more = nn.Linear(2, 2).double()
    one, other = job_of(Net().double()), job_of(wide)
    one.step(given)
    state = one.state_dict()
    one.save(tmp_path / "kept")
    for take in (lambda: other.load(tmp_path / "kept"), lambda: other.load_state_dict(state)):
        with pytest.raises(OutsizeError, match="lacks tensor 'more"):
            take()
            other.step(given)
    with pytest.raises(OutsizeError, match=r"expected what job\.state_dict"):
        one.load_state_dict({"weights": 3})
    with pytest.raises(OutsizeError, match="no checkpoint"):
        one.load(tmp_path)


@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_an_optimizer_that_has_made_steps_goes_on(kind) -> None:
    """In PyTorch's loop, then in a job, then in another job."""

    def optimizer_of(model):
        if kind == "sgd":
            return torch.optim.SGD(model.parameters(), 1e-2, momentum=0.9)
        # With a smaller one, gradients that are nothing but rounding move weights by 1e-11.
        return torch.optim.AdamW(model.parameters(), 1e-2, eps=1e-4)

    def plain(model, optimizer, given):
        optimizer.zero_grad()
        loss(model(given[0]), given).backward()
        optimizer.step()

    torch.manual_seed(0)
    model, given = Net().double(), batches(5)
    twin = copy.deepcopy(model)
    mine, want = optimizer_of(model), optimizer_of(twin)
    for b in given:
        plain(twin, want, b)
    plain(model, mine, given[0])
    for some in (given[1:3], given[3:]):
        job = outsize.prepare(model, mine, loss=loss)
        for b in some:
            job.step(b)
        job.close()
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.allclose(one, other, rtol=0, atol=1e-12)
