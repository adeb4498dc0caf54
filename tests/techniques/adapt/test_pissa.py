"""PiSSA: peft's initial values, outputs and gradients; files that peft reads; plans and resumes."""

from __future__ import annotations

from dataclasses import replace

import peft
import pytest
import torch
import transformers
from adapting import some_ids, sum_of_losses
from float64 import Float64
from plain import batches
from subjects import CONFIGS, MIXED, SEQUENCE, VOCAB, base_plan, config_of
from verifying import fill

import outsize
from outsize.collectives import Mesh
from outsize.models.names import adapter_layout
from outsize.optim import AdamW
from outsize.techniques.adapt.pissa import Pissa
from outsize.verify import Case, Native, verify

CLOSE = {"rtol": 1e-10, "atol": 1e-10}


def test_it_begins_computes_and_is_written_as_peft_has_it(tmp_path):
    """peft takes singular values in float32: only the products of factors are compared, to that."""
    facts = {k: v for k, v in CONFIGS["llama, untied"].items() if k != "model_type"}
    ids = some_ids()
    torch.manual_seed(3)
    made = transformers.LlamaForCausalLM(transformers.LlamaConfig(**facts)).float()
    made.save_pretrained(tmp_path / "base")
    stored = {name: value.clone() for name, value in made.state_dict().items()}
    plain = made(ids).logits.double()
    said = peft.LoraConfig(
        task_type="CAUSAL_LM", r=3, lora_alpha=6, target_modules=["q_proj", "down_proj"],
        init_lora_weights="pissa",
    )  # fmt: skip
    ours = outsize.load(tmp_path / "base", torch.float64)
    outsize.adapt(ours, "pissa", rank=3, alpha=6.0, targets=["q", "down"])
    with Float64():
        theirs = peft.get_peft_model(made, said).double().eval()
        torch.testing.assert_close(ours(ids), plain, rtol=1e-5, atol=1e-6)
        values = {n.replace(".default", ""): p for n, p in theirs.named_parameters()}
        one = ours.get_submodule("blocks.1.mlp.down.beside")
        file = "base_model.model.model.layers.1.mlp.down_proj.lora_"
        product = values[f"{file}B.weight"] @ values[f"{file}A.weight"]
        found = one.b.weight @ one.a.weight
        torch.testing.assert_close(found, product, rtol=1e-4, atol=1e-6)

        # From one set of values: what peft has left of the weights, in float64, on both sides.
        layout = adapter_layout(ours.config)
        for entry in layout:
            live, still = (ours.get_parameter(name) for name in entry.ours)
            wanted = values[entry.theirs[0]].detach()
            live.data.copy_(wanted + 0.1 * torch.randn_like(wanted))
            values[entry.theirs[0]].data.copy_(live.detach())
            still.data.copy_(wanted if "lora_A" in entry.theirs[0] else -wanted)
        for name, weight in ours.named_parameters():
            if name.endswith(("attention.q.weight", "mlp.down.weight")):
                beside = ours.get_submodule(f"{name.removesuffix('.weight')}.beside")
                left = values[theirs_of(name)].detach()
                weight.data.copy_(left - beside.scale * beside.b0.weight @ beside.a0.weight)
        expected, logits = theirs(ids).logits, ours(ids)
        torch.testing.assert_close(logits, expected, **CLOSE)
        (sum_of_losses(expected, ids) / ids.numel()).backward()
        (sum_of_losses(logits, ids) / ids.numel()).backward()
        for entry in layout:
            live, still = (ours.get_parameter(name) for name in entry.ours)
            torch.testing.assert_close(live.grad, values[entry.theirs[0]].grad, **CLOSE)
            assert still.grad is None

        outsize.save(ours, tmp_path / "adapter")
        again = transformers.LlamaForCausalLM(transformers.LlamaConfig(**facts)).double()
        again.load_state_dict({n: p.double() for n, p in stored.items()})
        for name, weight in ours.named_parameters():
            if name.endswith(("attention.q.weight", "mlp.down.weight")):
                again.get_parameter(theirs_of(name, "")).data.copy_(weight.detach())
        loaded = peft.PeftModel.from_pretrained(again, tmp_path / "adapter").eval()
        torch.testing.assert_close(loaded(ids).logits, logits, **CLOSE)
        torch.testing.assert_close(outsize.merge(ours)(ids), logits, **CLOSE)


def theirs_of(name: str, prefix: str = "base_model.model.") -> str:
    layer = name.split(".")[1]
    inside = "self_attn.q_proj" if name.endswith("attention.q.weight") else "mlp.down_proj"
    base = ".base_layer" if prefix else ""
    return f"{prefix}model.layers.{layer}.{inside}{base}.weight"


@pytest.mark.parametrize(
    ("plan", "steps"),
    [
        ({"mesh": Mesh(tensor=2), "sequence_parallel": True, "overlap": 2}, 1),
        ({"stages": MIXED, "microbatch_rows": 2}, 2),
    ],
    ids=["tensor", "recompute"],
)
def test_a_plan_trains_as_plain_pytorch(plan, steps):
    made = base_plan(**plan)
    data = batches(2, made.rows, SEQUENCE, VOCAB)
    config = replace(config_of("gemma2"), adapter=Pissa(3, 5.0))
    case = Case(
        Native(config, lambda: fill), made, AdamW(1e-2, eps=1e-4), lambda step: data[step], steps,
        0.5, resume_at=steps - 1,
    )  # fmt: skip
    found = verify(case, own=False)
    assert found.holds, found
    names = {row.name for row in found.exact.rows}
    assert names and all(n.endswith((".a.weight", ".b.weight")) for n in names)


def test_any_module_has_it_and_its_files(tmp_path):
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(6, 9), torch.nn.Tanh(), torch.nn.Linear(9, 4))
    model, x = model.double(), torch.randn(5, 6, dtype=torch.float64)
    plain = model(x)
    outsize.adapt(model, "pissa", rank=2)
    torch.testing.assert_close(model(x), plain, **CLOSE)
    for name, p in model.named_parameters():
        p.data += 0.1 * (name.endswith(".b.weight"))
    expected = model(x)
    outsize.save(model, tmp_path / "made", adapter_only=True)
    outsize.remove_adapter(model)
    torch.testing.assert_close(model(x), plain, **CLOSE)
    torch.testing.assert_close(outsize.adapt(model, tmp_path / "made")(x), expected, **CLOSE)
