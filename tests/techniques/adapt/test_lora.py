"""LoRA: peft's outputs, gradients and files, merged and not; every plan trains as plain PyTorch."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path

import peft
import pytest
import torch
import transformers
from float64 import Float64
from plain import batches
from rates import known_hardware
from subjects import CONFIGS, MIXED, SEQUENCE, VOCAB, base_plan, config_of
from verifying import fill

import outsize
from outsize.checkpoint import adapters, hub
from outsize.collectives import Mesh
from outsize.data import Batch
from outsize.errors import OutsizeError
from outsize.memory import Ledger
from outsize.models.build import build, initial_values
from outsize.models.names import adapter_layout
from outsize.optim import AdamW
from outsize.parallel.check.decoder import Spread, check_decoder
from outsize.parallel.tensor.declared import boundaries
from outsize.parallel.tensor.units import cuts_of
from outsize.plan import Pipelined, Rest, Sharding, Stage
from outsize.plan.plan import per_segment
from outsize.runtime import Job, NativeFlow
from outsize.runtime.making import NativeModel, make_job
from outsize.runtime.recipe import Here, Recipe
from outsize.search.planner import forecaster_of
from outsize.search.request import PlanRequest
from outsize.techniques.adapt.ia3 import Ia3
from outsize.techniques.adapt.lora import Lora
from outsize.techniques.adapt.serial_adapters import Serial
from outsize.verify import Case, Native, verify

DENSE = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
EAGER = {"attn_implementation": "eager", "experts_implementation": "eager"}
FAMILIES = {"llama": DENSE, "gemma2": DENSE, "mixtral": DENSE[:4], "deepseek_v3": ("o_proj",)}


@pytest.fixture
def exactly():
    """transformers computes in float64 throughout."""
    torch.set_default_dtype(torch.float64)
    with Float64():
        yield


def theirs(family: str, folder: Path, **options) -> peft.PeftModel:
    """A model of transformers with peft's adapter, both of random values, in float64."""
    facts = {k: v for k, v in CONFIGS[family].items() if k != "model_type"}
    config = transformers.AutoConfig.for_model(family, **facts)
    torch.manual_seed(5)
    model = transformers.AutoModelForCausalLM.from_config(config, **EAGER).double()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(folder / "base")
    said = {"r": 4, "lora_alpha": 6, "target_modules": list(FAMILIES[family])} | options
    model.name_or_path = str(folder / "base")
    made = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **said))
    for name, parameter in made.named_parameters():
        if "lora_" in name:
            parameter.data = torch.randn(parameter.shape, dtype=torch.float64) * 0.3
    made.peft_config["default"].base_model_name_or_path = str(folder / "base")
    made.save_pretrained(folder / "adapter")
    return made.eval()


def pretrained(folder: Path):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="float64", **EAGER)


def sum_of_losses(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    flat = logits[:, :-1].flatten(0, 1)
    return torch.nn.functional.cross_entropy(flat, ids[:, 1:].flatten(), reduction="sum")


def some_ids() -> torch.Tensor:
    return torch.randint(0, VOCAB, (2, 11), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("family", FAMILIES)
def test_outputs_and_gradients_are_pefts(family, tmp_path, exactly):
    peft_model, ids = theirs(family, tmp_path), some_ids()
    ours = adapters.load(tmp_path / "adapter", torch.float64)
    expected, found = peft_model(ids).logits, ours(ids)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    with peft_model.disable_adapter():
        assert not torch.allclose(found, peft_model(ids).logits, rtol=1e-3), "or it does nothing"
    sum_of_losses(expected, ids).backward()
    sum_of_losses(found, ids).backward()
    gradients = {n: p.grad for n, p in peft_model.named_parameters() if p.grad is not None}
    own = {name: p.grad for name, p in ours.named_parameters() if p.grad is not None}
    names = {entry.ours[0]: entry.theirs[0] for entry in adapter_layout(ours.config)}
    assert set(own) == set(names) and len(own) == len(gradients)
    for name, gradient in own.items():
        wanted = gradients[names[name].replace(".weight", ".default.weight")]
        torch.testing.assert_close(gradient, wanted, rtol=1e-10, atol=1e-10)


def test_a_rank_stabilised_scale_and_an_expression_are_read(tmp_path, exactly):
    regular = r".*\.layers\.\d+\.mlp\.(up|down)_proj"
    peft_model = theirs("llama", tmp_path, use_rslora=True, target_modules=regular)
    ours = adapters.load(tmp_path / "adapter", torch.float64)
    assert ours.config.adapter.targets == ("mlp.down", "mlp.up")
    expected = peft_model(some_ids()).logits
    torch.testing.assert_close(ours(some_ids()), expected, rtol=1e-10, atol=1e-10)


def test_peft_reads_what_is_saved_and_a_merged_model_is_a_plain_one(tmp_path, exactly):
    theirs("llama", tmp_path)
    ours, ids = adapters.load(tmp_path / "adapter", torch.float64), some_ids()
    adapters.save(ours, tmp_path / "saved")
    base = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "base", dtype="float64", **EAGER
    )
    again = peft.PeftModel.from_pretrained(base, tmp_path / "saved").eval()
    expected = ours(ids)
    torch.testing.assert_close(again(ids).logits, expected, rtol=1e-10, atol=1e-10)
    with pytest.raises(OutsizeError, match="merge it"):
        hub.save(ours, tmp_path / "refused")
    merged = adapters.merge(ours)
    assert merged is ours and all(p.requires_grad for p in merged.parameters())
    torch.testing.assert_close(merged(ids), expected, rtol=1e-10, atol=1e-10)
    adapters.save(merged, tmp_path / "merged")
    names = [set(model.state_dict()) for model in (merged, hub.load(tmp_path / "base"))]
    assert names[0] == names[1]
    plain = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "merged", dtype="float64", **EAGER
    )
    torch.testing.assert_close(plain(ids).logits, expected, rtol=1e-10, atol=1e-10)


def test_initial_values_are_pefts_in_distribution():
    config = replace(config_of("llama"), adapter=Lora(rank=8))
    model = build(config, seed=3)
    first = dict(initial_values(model))
    a, b = (model.get_parameter(f"blocks.1.mlp.down.beside.{x}.weight") for x in "ab")
    assert not b.any() and not a.requires_grad ^ b.requires_grad
    layer = torch.nn.Linear(a.shape[1], a.shape[0], bias=False)
    torch.nn.init.kaiming_uniform_(layer.weight, a=5**0.5)
    bound = first["blocks.1.mlp.down.beside.a.weight"].bound
    assert layer.weight.abs().max() <= bound < layer.weight.abs().max() * 1.05
    assert a.abs().max() <= bound < a.abs().max() * 1.05
    assert abs(float(a.detach().mean())) < bound * 5 / (3 * a.numel()) ** 0.5
    plain = build(config_of("llama"), seed=3)
    for name, value in plain.named_parameters():  # the model's own are what they were
        assert torch.equal(model.get_parameter(name), value)
        assert not model.get_parameter(name).requires_grad


PLANS = {
    "recompute, base on the disk": {
        "stages": tuple(replace(s, rest=Rest("disk")) for s in MIXED), "microbatch_rows": 2,
    },
    "chunks": {
        "stages": (Stage(0, 1), Stage(1, 4, ("block",)), Stage(4, 5)), "sequence_chunk": 6,
        "mlp_tile": 6, "loss_chunk": 7,
    },
    "parameters cut": {"mesh": Mesh(data=2), "shards": Sharding(2, 2, 2)},
    "tensor, by tokens, overlapped": {
        "mesh": Mesh(tensor=2), "sequence_parallel": True, "overlap": 2,
    },
    "pipeline, weights apart": {"mesh": Mesh(pipeline=2), "pipeline": Pipelined("zb-h1")},
}  # fmt: skip
RESUMED = ("recompute, base on the disk", "parameters cut")  # fmt: skip


def case_of(family: str, adapter: Lora, resumed: bool = False, **plan) -> Case:
    """resumed: a second step, of a job that goes on from the first one's states."""
    made = base_plan(**plan)
    data = batches(2, made.rows, SEQUENCE, VOCAB)
    config = replace(config_of(family), adapter=adapter)
    return Case(
        Native(config, lambda: fill), made, AdamW(1e-2, eps=1e-4), lambda step: data[step],
        1 + resumed, 0.5, resume_at=int(resumed),
    )  # fmt: skip


# The adapter is the same in both families; what gemma2 adds meets every kind of plan with other
# adapters in test_plans.py, and without in tests/verify/test_matrix.py.
@pytest.mark.parametrize(
    ("plan", "family"), [*zip(PLANS, itertools.cycle(["llama, untied", "gemma2"]), strict=False)]
)
def test_a_plan_trains_as_plain_pytorch(family, plan):
    case = case_of(family, Lora(3, 5.0), plan in RESUMED, **PLANS[plan])
    found = verify(case, own=False)
    assert found.holds, found
    names = {row.name for row in found.exact.rows}
    assert names and all(".beside." in name for name in names), "what is frozen has no gradient"


@pytest.mark.parametrize("family", ["deepseek_v3", "mixtral", "gpt2"])
def test_a_tensor_axis_cuts_every_kind_of_projection(family):
    plan = {"mesh": Mesh(1, 2), "sequence_parallel": True}
    if family == "gpt2":  # whose sums are hidden, of all tokens
        plan = {"mesh": Mesh(1, 3), "overlap": 2}
    assert verify(case_of(family, Lora(3, 5.0), **plan), own=False).holds


@pytest.mark.parametrize(
    ("family", "sequence_parallel"), [("llama", False), ("deepseek_v3", False), ("gpt2", True)]
)
def test_the_checker_passes_its_layouts_and_sees_wrong_ones(family, sequence_parallel):
    config = replace(config_of(family), adapter=Lora(3))
    size = 3 if family == "gpt2" else 2
    cuts = cuts_of(build(config), size, 0, sequence_parallel)

    def found(cuts):
        return check_decoder(config, size, Spread(cuts, boundaries(sequence_parallel)))

    assert not found(cuts)
    for name in ("attention.o.beside.b", "mlp.up.beside.a"):
        full = next(n for n in cuts if n.endswith(f"{name}.weight"))
        assert found({**cuts, full: replace(cuts[full], partial=False)}), full


def test_states_follow_from_what_is_trained(tmp_path):
    config = replace(config_of("llama", num_hidden_layers=3), adapter=Lora(rank=2))
    model, ledger = build(config, seed=1, dtype=torch.float64), Ledger()
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    frozen = sum(p.numel() for p in model.parameters() if not p.requires_grad)
    job = Job(NativeFlow(model, plan := base_plan()), plan, Recipe(AdamW()), Here(ledger=ledger))
    job.step(batches(1, plan.rows, SEQUENCE, VOCAB)[0])
    chunks = job.chunks
    assert sum(c.parameters.nbytes for c in chunks) == 8 * (trained + frozen)
    assert sum(c.gradients.nbytes for c in chunks if c.gradients is not None) == 8 * trained
    states = sum(x.nbytes for c in chunks for x in c.optimizer.values())
    assert states == 2 * 8 * trained
    assert trained < frozen / 4, "or this says nothing"


def predicted(config, plan):
    request = PlanRequest(
        plan.rows, SEQUENCE, plan.precision, AdamW(), documents=(0, 7, SEQUENCE), mesh=plan.mesh
    )
    return forecaster_of(config, request, known_hardware()).forecast(plan)


@pytest.mark.parametrize(
    ("adapter", "recompute"),
    [
        (Lora(2), ("block",)),
        (Serial(3), ()),
        (Lora(2, targets=("blocks.1.mlp", "blocks.2.q")), ()),
    ],
)
def test_the_forecast_is_what_is_measured(adapter, recompute):
    config = replace(config_of("llama", num_hidden_layers=3), adapter=adapter)
    plan = base_plan("float32", stages=per_segment(5, recompute))
    made, ledger = predicted(config, plan), Ledger()
    model = build(config, seed=1)
    job = Job(NativeFlow(model, plan), plan, Recipe(AdamW()), Here(ledger=ledger))
    assert {k: n for k, n in ledger.live.items() if n} == {
        k: n for k, n in made.static.items() if k not in ("data", "window")
    }
    ids = torch.randint(0, VOCAB, (plan.rows, SEQUENCE))
    job.step(Batch(ids, ids.roll(-1, 1), ((0, 7, SEQUENCE),) * plan.rows))
    assert 0 <= made.peak - job.report.trace.peak() < made.peak * 1e-3
    live = [event.live for event in made.trace.events]
    assert live and min(n for one in live for n in one.values()) >= 0


def test_somebodys_own_loop_trains_saves_and_goes_on(tmp_path):
    theirs("llama", tmp_path)
    ids = some_ids()

    def made():
        model = outsize.load(tmp_path / "base", torch.float64)
        outsize.adapt(model, {"lora": {"rank": 4, "targets": ["attention"]}}, seed=3)
        return model, outsize.prepare(model, "adamw")

    model, job = made()
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    losses = [float(job.step(ids)) for _ in range(3)]
    assert losses[2] < losses[0]
    assert all(torch.equal(value, before[n]) == (".beside." not in n) for n, value in job.weights())
    job.save(tmp_path / "job")
    following = float(job.step(ids))
    _, again = made()
    again.load(tmp_path / "job")
    assert float(again.step(ids)) == following
    saved = outsize.load(next((tmp_path / "job").glob("step-*")))
    assert saved.config.adapter == Lora(
        4, 16.0, ("attention.k", "attention.o", "attention.q", "attention.v")
    )
    with pytest.raises(OutsizeError, match="it has an adapter already"):
        outsize.adapt(model, {"lora": {}})
    with pytest.raises(OutsizeError, match="rnk"):
        outsize.adapt(model, {"lora": {"rnk": 4}})


@pytest.mark.parametrize("said", ["q", "q_proj", ["self_attn.q_proj"], ["attention.q"]])
def test_one_target_needs_no_list_and_may_have_its_name_in_files(said):
    model = outsize.adapt(build(config_of("llama"), seed=1), "lora", rank=2, targets=said)
    trained = {n.split(".", 2)[2] for n, p in model.named_parameters() if p.requires_grad}
    assert trained == {f"attention.q.beside.{part}.weight" for part in "ab"}


REFUSED = {
    "no such part": (Lora(targets=("nose",)), {}, "'nose' names no linear layer of this model"),
    "kraken": (Lora(4), {"kraken_ways": 2}, "kraken_ways"),
    "a scaled sum": (
        Ia3(("attention.o",), ()),
        {"attention_bias": True},
        "attention.o has a bias that is added",
    ),
    "factors": (Lora(4), {"factored_weights": {"rank": 3}}, "factored_weights"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_adapted_is_refused(name):
    adapter, changes, words = REFUSED[name]
    with pytest.raises(OutsizeError, match=words):
        build(replace(config_of("llama", **changes), adapter=adapter))


def test_local_learning_is_refused():
    model = build(replace(config_of("llama, untied"), adapter=Lora(4)), seed=1)
    plan = base_plan("float32", approximate=("local-learning",))
    with pytest.raises(OutsizeError, match="beside an adapter"):
        make_job(NativeModel(model), plan, Recipe(AdamW()))


def test_what_files_hold_fused_is_refused_with_its_name():
    with pytest.raises(OutsizeError, match=r"attention.q with others in attn.c_attn"):
        adapter_layout(replace(config_of("gpt2"), adapter=Lora(4)))
    assert adapter_layout(replace(config_of("gpt2"), adapter=Lora(targets=("mlp",))))


@pytest.fixture(scope="module")
def told(tmp_path_factory) -> tuple[Path, dict]:
    """An adapter's file of settings, and what it says."""
    folder = tmp_path_factory.mktemp("theirs")
    theirs("llama", folder)
    file = folder / "adapter" / adapters.ADAPTER_CONFIG
    return file, json.loads(file.read_text())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"lora_bias": True}, "lora_bias is True"),
        ({"peft_type": "XLORA"}, "peft_type is 'XLORA'; expected one of IA3, LOHA"),
        ({"base_model_name_or_path": "/nowhere"}, "is no directory here"),
        ({"target_modules": ["nose"]}, "names no weight of the blocks"),
        ({"r": 3}, "lora_A.weight' has shape"),
        ({"alora_invocation_tokens": [3]}, r"alora_invocation_tokens is \[3\]"),
        ({"use_qalora": True}, "use_qalora is True"),
        ({"init_lora_weights": "loftq"}, "init_lora_weights is 'loftq', which has changed"),
    ],
)
def test_an_adapter_that_is_not_read_is_refused(change, words, told):
    file, said = told
    file.write_text(json.dumps({**said, **change}))
    with pytest.raises(OutsizeError, match=words):
        adapters.load(file.parent)


@pytest.mark.parametrize("way", ["pissa", "olora"])
def test_an_adapter_beside_other_weights_is_read_as_peft_converts_it_alone(way, tmp_path):
    """These begin by taking something out of the weights, which their files do not have."""
    facts = {k: v for k, v in CONFIGS["llama"].items() if k != "model_type"}
    torch.manual_seed(5)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**facts))
    model.save_pretrained(tmp_path / "base")
    model.name_or_path = str(tmp_path / "base")
    said = peft.LoraConfig(
        task_type="CAUSAL_LM", r=4, target_modules=["q_proj"], init_lora_weights=way
    )
    made = peft.get_peft_model(model, said).eval()
    made.peft_config["default"].init_lora_weights = True
    made.save_pretrained(tmp_path / "first")
    made.peft_config["default"].init_lora_weights = way
    for name, parameter in made.named_parameters():
        if "lora_" in name:
            parameter.data += 0.1 * torch.randn_like(parameter)
    expected = made(some_ids()).logits.detach()
    made.save_pretrained(tmp_path / "theirs")
    made.save_pretrained(
        tmp_path / "ours", path_initial_model_for_weight_conversion=str(tmp_path / "first")
    )
    with pytest.raises(OutsizeError, match=f"init_lora_weights is '{way}', which has changed"):
        adapters.load(tmp_path / "theirs")
    ours = adapters.load(tmp_path / "ours")(some_ids())
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)
