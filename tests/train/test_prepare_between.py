"""What somebody's own loop does between two steps of a job, against the same in PyTorch."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from normalised import Net, batches, loss
from torch import nn
from torch.nn import functional as F

import outsize
from outsize import OutsizeError
from outsize.models.build import build
from outsize.models.families import parse


def network(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    return Net().to(dtype)


def plain_step(model, optimizer, batch) -> float:
    optimizer.zero_grad()
    found = loss(model(batch[0]), batch)
    found.backward()
    optimizer.step()
    return float(found.detach())


def adamw(model, **more):
    return torch.optim.AdamW(model.parameters(), 1e-2, eps=1e-4, **more)


def test_copies_of_the_model_compute_with_their_own_weights() -> None:
    """As an average of the weights is one; and a model can be pickled whole."""
    model, given = network(), batches(2)
    job = outsize.prepare(model, adamw(model), loss=loss)
    job.step(given[0])
    model.eval()
    copies = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    then = model(given[1][0])
    model.train()
    job.step(given[1])
    for other in copies:
        assert [type(one) for one in other.modules()].count(nn.Sequential) == 2
        assert torch.equal(other(given[1][0]), then)
    job.close()
    assert type(model.blocks[0]) is nn.Sequential


@pytest.mark.parametrize("when", ["before the first step", "between"])
def test_states_loaded_into_the_optimizer_are_the_jobs(when) -> None:
    given, twin = batches(5), network()
    want = adamw(twin)
    for batch in given[:2]:
        plain_step(twin, want, batch)
    kept = copy.deepcopy((twin.state_dict(), want.state_dict()))
    losses = [plain_step(twin, want, batch) for batch in given[2:]]

    model = network()
    have = adamw(model)
    job = outsize.prepare(model, have, loss=loss)
    if when == "between":
        job.step(given[4])
    model.load_state_dict(kept[0])
    have.load_state_dict(kept[1])
    assert [float(job.step(b)) for b in given[2:]] == pytest.approx(losses, rel=1e-10)
    states = have.state_dict()["state"]
    assert float(states[0]["step"]) == 5 == job.state_dict()["steps"]
    assert torch.allclose(states[0]["exp_avg"], want.state_dict()["state"][0]["exp_avg"], 1e-10)


def test_the_optimizer_makes_no_steps_of_its_own() -> None:
    model, batch = network(), batches(1)[0]
    have = adamw(model)
    job = outsize.prepare(model, have, loss=loss)
    job.step(batch)
    have.zero_grad()
    with pytest.raises(OutsizeError, match=r"lr is 0\.5 for this step, and the optimizer that"):
        job.step(batch, lr=0.5)
    with pytest.raises(OutsizeError, match=r"optimizer\.step: job\.step\(batch\) has updated"):
        have.step()
    job.close()
    plain_step(model, have, batch)


@pytest.mark.parametrize(
    "dtype, way",
    [(torch.float64, "in place"), (torch.bfloat16, "in place"), (torch.bfloat16, "by data")],
)
def test_weights_that_are_changed_are_those_that_train_on(dtype, way) -> None:
    """Also where they are roundings of a master copy."""
    given = [(x.to(dtype), y) for x, y in batches(2)]
    model = network(dtype)
    job = outsize.prepare(model, adamw(model), loss=loss)
    job.step(given[0])
    with torch.no_grad():
        if dtype == torch.float64:  # which gives each parameter other memory
            size = sum(p.numel() for p in model.parameters())
            nn.utils.vector_to_parameters(torch.zeros(size).double(), model.parameters())
        else:
            for parameter in model.parameters():
                (parameter if way == "in place" else parameter.data).zero_()
    assert all(not weight.any() for _, weight in job.weights())
    with torch.no_grad():
        model.head.bias.fill_(3)
    job.step(given[1])
    for name, weight in job.weights():
        still = (weight - 3 * (name == "head.bias")).abs().max()
        assert still < 0.03, f"{name} has moved by more than an update does"
        assert torch.equal(dict(model.named_parameters())[name], weight.to(dtype))
    model.float()
    with pytest.raises(OutsizeError, match=r"is of torch.float32 on cpu now, and the job has it"):
        job.step(given[1])


@pytest.mark.parametrize("memory", [500_000, 250_000])
def test_a_master_copy_keeps_what_nobody_has_changed(tmp_path, memory) -> None:
    """On the device or on a disk, while the parameters are here; a reference to `data` that
    somebody keeps is written to later."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(6)]
    model, batch = nn.Sequential(*layers).bfloat16(), torch.randn(2, 4, 64).bfloat16().unbind()
    job = outsize.prepare(
        model, adamw(model), loss=lambda out, batch: (out - batch[1]).square().float().sum(),
        memory=memory, disk=f"{tmp_path}:1GiB",
    )  # fmt: skip
    job.step(batch)
    on_disk = {stage.rest.optimizer for stage in job.plan.stages} - {"device"}
    assert on_disk == ({"disk"} if memory < 300_000 else set())
    kept = {name: parameter.data for name, parameter in model.named_parameters()}
    job.step(batch)
    before = {name: weight.clone() for name, weight in job.weights()}
    for weight in kept.values():
        weight[0].add_(1)
    for name, weight in job.weights():
        assert weight.dtype == torch.float32
        assert torch.equal(weight[1:], before[name][1:])
        assert torch.equal(weight[0], kept[name][0].float())
        assert not torch.equal(weight[0], before[name][0])
    copies = copy.deepcopy(model)
    assert {type(parameter) for parameter in copies.parameters()} == {nn.Parameter}


def test_a_backward_pass_of_ones_own_adds_nothing_to_the_next_step() -> None:
    model, given = network(), batches(3)
    twin = network()
    want, job = adamw(twin), outsize.prepare(model, adamw(model), loss=loss)
    for batch in given:
        assert float(job.step(batch)) == pytest.approx(plain_step(twin, want, batch), rel=1e-10)
        model.eval()(given[0][0]).square().sum().backward()
        model.train()


def test_adam_is_adamw_where_nothing_decays() -> None:
    given, model, twin = batches(3), network(), network()
    have = torch.optim.Adam(model.parameters(), 1e-2, eps=1e-4)
    want, job = torch.optim.Adam(twin.parameters(), 1e-2, eps=1e-4), None
    job = outsize.prepare(model, have, loss=loss)
    for batch in given:
        assert float(job.step(batch)) == pytest.approx(plain_step(twin, want, batch), rel=1e-10)
    assert float(have.state_dict()["state"][0]["step"]) == 3
    decaying = torch.optim.Adam(model.parameters(), weight_decay=0.1)
    with pytest.raises(OutsizeError, match=r"adds its weight_decay to gradients.*AdamW"):
        outsize.prepare(model, decaying, loss=loss)


def test_a_parameter_that_is_not_the_models_is_refused() -> None:
    """As of a loss that learns: nobody would train it."""
    model, scale = network(), nn.Parameter(torch.ones(7))
    optimizer = torch.optim.AdamW([*model.parameters(), scale])
    with pytest.raises(OutsizeError, match=r"parameter of shape \(7,\) that the Net has not"):
        outsize.prepare(model, optimizer, loss=loss)


@pytest.mark.parametrize("microbatches", [1, 2])
def test_batches_of_other_numbers_of_rows_are_trained_on_whole(microbatches) -> None:
    """More of them than the first one, fewer, and fewer than microbatches."""

    def total(output, given):
        return F.cross_entropy(output, given[1], reduction="sum")

    made, sizes = torch.Generator().manual_seed(1), (4, 6, 3, 1)
    given = [(torch.randn(n, 6, generator=made).double(), torch.arange(n) % 3) for n in sizes]
    model = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(2))).double()
    twin = copy.deepcopy(model)
    want = adamw(twin)
    job = outsize.prepare(
        model, adamw(model), loss=total, count=lambda b: len(b[1]), microbatches=microbatches
    )
    for batch in given:
        assert float(job.step(batch)) == pytest.approx(plain_step(twin, want, batch), rel=1e-10)
    summed = F.cross_entropy(twin(given[1][0]), given[1][1], reduction="sum")
    assert job.evaluate(given[1]) == (pytest.approx(float(summed.detach()), rel=1e-10), 6)


@pytest.mark.parametrize("microbatches", [1, 3])
def test_so_are_a_native_decoders(microbatches) -> None:
    config = {
        "model_type": "llama", "hidden_size": 16, "num_hidden_layers": 1, "vocab_size": 29,
        "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 24,
        "max_position_embeddings": 32, "rms_norm_eps": 1e-5, "hidden_act": "silu",
    }  # fmt: skip
    model = build(parse(config), 0, torch.float64)
    job = outsize.prepare(model, "sgd", microbatches=microbatches)
    for rows in (3, 5, 2):
        ids = torch.randint(0, 29, (rows, 8), generator=torch.Generator().manual_seed(rows))
        want = F.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        assert float(job.step(ids)) == pytest.approx(float(want.detach()), rel=1e-10)


def cleared(optimizer) -> None:
    optimizer.state.clear()


def replaced(optimizer) -> None:
    for parameter in optimizer.param_groups[0]["params"]:
        state = optimizer.state[parameter]
        state["exp_avg"] = torch.zeros_like(state["exp_avg"])


def begun_again(optimizer) -> None:
    for state in optimizer.state.values():
        state["step"].zero_()


def regrouped(optimizer) -> None:
    first, second = optimizer.param_groups
    second["params"].append(first["params"].pop(0))


class Sometimes(Net):
    """Has a parameter that some steps leave out."""

    def __init__(self) -> None:
        super().__init__()
        self.shift, self.on = nn.Parameter(torch.zeros(3)), True

    def forward(self, x):
        y = super().forward(x)
        return y + self.shift if self.on else y


@pytest.mark.parametrize("edit", [cleared, replaced, begun_again, regrouped])
def test_an_optimizer_that_is_edited_goes_on_as_it_is(edit) -> None:
    """Whose counts of updates are each parameter's own."""
    torch.manual_seed(0)
    given, model = batches(4), Sometimes().double()
    twin = copy.deepcopy(model)

    def grouped(m):
        named = [[p for n, p in m.named_parameters() if n.startswith("head") is own]
                 for own in (False, True)]  # fmt: skip
        return torch.optim.AdamW([{"params": named[0]}, {"params": named[1], "lr": 3e-2}], 1e-2)

    want, have = grouped(twin), grouped(model)
    job = outsize.prepare(model, have, loss=loss)
    for place, batch in enumerate(given):
        model.on = twin.on = place != 1
        assert float(job.step(batch)) == pytest.approx(plain_step(twin, want, batch), rel=1e-10)
        if place == 1:
            edit(want)
            edit(have)
    mine, other = have.state_dict()["state"], want.state_dict()["state"]
    for index, state in other.items():
        assert float(mine[index]["step"]) == float(state["step"])
        assert torch.allclose(mine[index]["exp_avg"], state["exp_avg"], 1e-10)


@pytest.mark.parametrize("edit", [replaced, regrouped])
def test_an_optimizer_that_has_copies_is_not_to_be_edited(edit, tmp_path) -> None:
    model, given = network(), batches(1)[0]
    first, *others = model.parameters()
    have = torch.optim.AdamW([{"params": others}, {"params": [first]}], 1e-2)
    job = outsize.prepare(model, have, "1MiB", loss=loss, disk=f"{tmp_path}:1GiB")
    job.step(given)
    have.state_dict()
    edit(have)
    with pytest.raises(OutsizeError, match=r"optimizer(\.state has been changed| has other param)"):
        job.step(given)


def test_hooks_of_the_optimizers_step_are_refused() -> None:
    model = network()
    have = adamw(model)
    job = outsize.prepare(model, have, loss=loss)
    job.step(batches(1)[0])
    hook = have.register_step_post_hook(lambda *_: None)
    with pytest.raises(OutsizeError, match="optimizer has a hook of its step"):
        job.step(batches(1)[0])
    hook.remove()
    job.step(batches(1)[0])
    job.close()
    have.register_step_pre_hook(lambda *_: None)
    with pytest.raises(OutsizeError, match="optimizer has a hook of its step"):
        outsize.prepare(model, have, loss=loss)


def other_head(model) -> None:
    model.head = nn.Linear(6, 3).double()


def one_more(model) -> None:
    model.scale = nn.Parameter(torch.ones(3).double())


def one_less(model) -> None:
    model.head.bias = None


def assigned(model) -> None:
    model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (other_head, "'head.weight' is another one than"),
        (one_more, "'scale' was not there"),
        (one_less, "'head.bias' is no longer there"),
        (assigned, "'blocks.0.0.weight' is another one than"),
    ],
)
def test_other_parameters_than_the_jobs_are_refused(change, said) -> None:
    model = network()
    job = outsize.prepare(model, adamw(model), loss=loss)
    job.step(batches(1)[0])
    change(model)
    for call in (lambda: job.step(batches(1)[0]), job.state_dict):
        with pytest.raises(OutsizeError, match=f"parameter {said}.*when the job was made"):
            call()
    job.close()
    outsize.prepare(model, adamw(model), loss=loss).step(batches(1)[0])


class Skipping(nn.Module):
    """Leaves blocks out by chance (LayerDrop), behind a normalisation that counts."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3))
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        x = self.norm(x)
        for block in self.blocks:
            if torch.rand(()) > 0.15:
                x = x + block(x)
        return self.head(x)


def test_blocks_that_a_later_step_leaves_out() -> None:
    given, outcomes = batches(6), []
    for prepared in (False, True):
        torch.manual_seed(1)
        model = Skipping().double()
        optimizer = adamw(model)
        torch.manual_seed(2)  # the first step leaves out none
        job = outsize.prepare(model, optimizer, loss=loss) if prepared else None
        losses, segments = [], []
        for batch in given:
            losses.append(float(job.step(batch)) if job else plain_step(model, optimizer, batch))
            segments.append(job.plan.segments if job else 0)
        outcomes.append((losses, [*model.parameters(), *model.buffers()], segments))
    (want, tensors, _), (have, others, segments) = outcomes
    assert have == pytest.approx(want, rel=1e-10)
    assert segments[0] == 5 and segments[-1] == 2
    for one, other in zip(tensors, others, strict=True):
        assert torch.allclose(one, other, 1e-10)
