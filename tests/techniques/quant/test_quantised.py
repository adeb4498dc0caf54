"""Frozen weights as codes: every plan trains beside them as plain PyTorch does beside the weights
that they stand for; files, memory and words."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from plain import batches
from rates import known_hardware
from subjects import CONFIGS, MIXED, SEQUENCE, VOCAB, base_plan, config_of
from verifying import fill

import outsize
from outsize.checkpoint import hub
from outsize.checkpoint.files import read_header, read_tensor
from outsize.cli.main import main
from outsize.collectives import Mesh, PretendWorld
from outsize.errors import OutsizeError
from outsize.memory import Ledger
from outsize.models.build import build, coded_draw
from outsize.models.coding import coded, decoded, format_of, plain
from outsize.models.config import DecoderConfig
from outsize.models.families import parse
from outsize.models.linear import linears
from outsize.optim import AdamW
from outsize.parallel.divide import divide
from outsize.plan import Pipelined, Rest, Sharding
from outsize.plan.plan import per_segment
from outsize.runtime import Job, NativeFlow
from outsize.runtime.recipe import Here, Recipe
from outsize.search.planner import forecaster_of
from outsize.search.request import PlanRequest
from outsize.techniques.adapt.lora import Lora
from outsize.verify import Case, Native, verify

SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3}
WIDE = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 2}
GPT = {"n_embd": 48, "n_head": 3}
GEMMA = {**SIZES, "head_dim": 16}
TWO = {"mesh": Mesh(data=2)}
PLANS = {
    "recompute, base on the disk": {
        "stages": tuple(replace(s, rest=Rest("disk")) for s in MIXED), "microbatch_rows": 2,
    },
    "parameters cut": {**TWO, "shards": Sharding(2, 2, 2)},
    "tensor, by tokens, overlapped": {
        "mesh": Mesh(tensor=2), "sequence_parallel": True, "overlap": 2,
    },
    "pipeline": {"mesh": Mesh(pipeline=2), "pipeline": Pipelined("1f1b")},
}  # fmt: skip
RESUMED = ("recompute, base on the disk", "parameters cut")  # fmt: skip


def quantised(family: str, name: str, **sizes) -> DecoderConfig:
    return coded(config_of(family, **sizes), format_of(name))


def case_of(config: DecoderConfig, named: str = "float64", resumed: bool = False, **plan) -> Case:
    """resumed: a second step, of a job that goes on from the first one's states."""
    made = base_plan(named, **plan)
    data = batches(2, made.rows, SEQUENCE, VOCAB)
    config = replace(config, adapter=Lora(3, 5.0))
    values = lambda: coded_draw(build(config), fill)  # noqa: E731
    return Case(
        Native(config, values), made, AdamW(1e-2, eps=1e-4), lambda step: data[step], 1 + resumed,
        0.5, resume_at=int(resumed),
    )  # fmt: skip


@pytest.mark.parametrize("plan", PLANS)
def test_a_plan_trains_as_plain_pytorch_beside_the_decoded_weights(plan):
    config = quantised("llama, untied", "int4:16", **SIZES)
    found = verify(case_of(config, resumed=plan in RESUMED, **PLANS[plan]), own=False)
    assert found.holds, found
    names = {row.name for row in found.exact.rows}
    assert names and all(".beside." in name for name in names), "codes have no gradient"


@pytest.mark.parametrize(
    ("family", "name", "sizes", "axis"),
    [
        ("gpt2", "int8:16", GPT, 3),
        ("gemma2", "q8_0", {**SIZES, "head_dim": 16}, 2),
    ],
)
def test_a_tensor_axis_cuts_codes_between_groups(family, name, sizes, axis):
    config = quantised(family, name, **sizes)
    assert verify(case_of(config, mesh=Mesh(tensor=axis)), own=False).holds


def test_in_bfloat16_no_number_is_farther_off_than_rounding_explains():
    """Decoded weights are rounded to it, as those of a plain run are."""
    found = verify(case_of(quantised("llama", "nf4:16", **SIZES), "bfloat16"))
    assert found.holds, found


def test_codes_of_a_worker_are_a_part_of_the_whole_weights():
    """nf4's second scales are whole: each part knows where in the weight it lies."""
    config = quantised("llama, untied", "nf4", **WIDE)
    model = build(config, seed=1)
    whole = {n: one.decoded(0, one.sizes[0], torch.float32) for n, one in linears(model)}
    for rank in range(2):
        model = build(config, seed=1)
        plan = base_plan(mesh=Mesh(tensor=2))
        divide(model, PretendWorld(plan.mesh, rank), plan)
        for name, one in linears(model):
            dim = 1 if one.use == "row" else 0
            half = whole[name].chunk(2, dim)[rank]
            assert torch.equal(one.decoded(0, one.sizes[0], torch.float32), half), name


def test_a_cut_inside_a_group_is_refused():
    config = quantised("llama, untied", "int4:32", hidden_size=64, intermediate_size=96)
    with pytest.raises(OutsizeError, match=r"cuts blocks\.0\.mlp\.down\.codes at input 48"):
        divide(build(config), PretendWorld(Mesh(tensor=2), 0), base_plan(mesh=Mesh(tensor=2)))


def test_groups_that_do_not_divide_are_refused():
    words = "groups of 64 weights, which do not divide the 24 .*; choose another format"
    with pytest.raises(OutsizeError, match=words):
        build(quantised("llama, untied", "int4"))
    with pytest.raises(OutsizeError, match=r"smaller groups \(FORMAT:16\) or another format"):
        build(quantised("llama, untied", "int4", hidden_size=64, intermediate_size=176))


def test_the_forecast_is_what_is_measured():
    config = replace(quantised("llama", "nf4", **WIDE), adapter=Lora(rank=2))
    plan = base_plan("bfloat16", stages=per_segment(5, ("block",)))
    request = PlanRequest(plan.rows, SEQUENCE, plan.precision, AdamW(), mesh=plan.mesh)
    made = forecaster_of(config, request, known_hardware()).forecast(plan)
    model, ledger = build(config, seed=1), Ledger()
    job = Job(NativeFlow(model, plan), plan, Recipe(AdamW()), Here(ledger=ledger))
    assert {k: n for k, n in ledger.live.items() if n} == {
        k: n for k, n in made.static.items() if k not in ("data", "window")
    }
    job.step(batches(1, plan.rows, SEQUENCE, VOCAB)[0])
    codes = sum(p.nbytes for p in model.parameters() if p.dtype == torch.uint8)
    matrices = sum(one.sizes[0] * one.sizes[1] for _, one in linears(model))
    blocks = codes - 4 * sum(
        1 + -(-a * b // 16384) for a, b in (o.sizes for _, o in linears(model))
    )
    assert blocks == matrices * 33 / 64, "a byte for two weights and one for 64"
    held = {c.parameters.dtype for c in job.chunks if not c.table.trainable}
    assert held == {torch.uint8, torch.bfloat16}
    assert 0 <= made.peak - job.report.trace.peak() <= 0.01 * made.peak


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A model of several projections that its files fuse (phi3), and a plain one."""
    for name in ("phi3", "llama"):
        facts = {**CONFIGS["llama, untied"], **SIZES, "model_type": name, "pad_token_id": 0}
        model = build(parse({**facts, "initializer_range": 0.2, "vocab_size": 257}), seed=4)
        outsize.save(model, tmp_path / name)
    return tmp_path


def test_a_model_is_quantised_while_it_is_read(directory, tmp_path):
    """Also one whose files fuse what is coded apart; logits are those of the decoded weights."""
    ids = torch.randint(0, 257, (2, 9))
    for name in ("phi3", "llama"):
        whole, found = (outsize.load(directory / name, weights=w) for w in ("required", "nf4"))
        moved = dict(linears(found))
        for path, one in linears(whole):
            form = format_of("nf4")
            one.weight.data = decoded(form, *form.encode(one.weight.detach()))
            held = moved[path]
            assert torch.equal(held.decoded(0, held.sizes[0], torch.float32), one.weight), path
        torch.testing.assert_close(found(ids), whole(ids), rtol=1e-4, atol=1e-4)
        assert found.generate([1, 2, 3], 4) == whole.generate([1, 2, 3], 4)


def test_codes_in_files_load_and_stream_as_they_are(directory):
    ids = torch.randint(0, 257, (1, 9))
    for name, weights in (("phi3", "int4:32"), ("llama", "nf4")):
        made = outsize.load(directory / name, weights=weights)
        outsize.save(made, directory / f"{name} coded")
        said = hub.read_json(directory / f"{name} coded" / "config.json")
        assert said["quantization_config"] == {"quant_method": "outsize", "format": weights}
        again = outsize.load(directory / f"{name} coded")
        assert torch.equal(again(ids), made(ids))
        size = (directory / f"{name} coded" / "model.safetensors").stat().st_size
        with outsize.load(directory / f"{name} coded", memory="400KiB") as streamed:
            assert streamed.home.source.spill is None, "nothing is converted"
            assert streamed.generate([1, 2, 3], 4) == made.generate([1, 2, 3], 4)
        with outsize.load(directory / name, memory="8MiB", weights=weights) as streamed:
            assert streamed.generate([1, 2, 3], 4) == made.generate([1, 2, 3], 4)
        assert size < (directory / name / "model.safetensors").stat().st_size / 2


def test_the_command_converts_and_generates(directory):
    run, into = CliRunner(), str(directory / "int4")
    made = run.invoke(
        main, ["convert", str(directory / "llama"), "--weights", "int4", "--into", into]
    )
    assert made.exit_code == 0, made.output
    asked = ["--prompt", "a", "--max-tokens", "4", "--tokenizer", "bytes"]
    texts = [
        run.invoke(main, ["generate", *where, *asked]).output
        for where in ([into], [str(directory / "llama"), "--weights", "int4"])
    ]
    assert texts[0] == texts[1] and texts[0].startswith("a")
    refused = run.invoke(main, ["generate", into, "--weights", "nf4", *asked])
    assert refused.exit_code == 2 and "files hold int4" in refused.output


def test_damaged_scales_and_unknown_codings_are_refused(directory, tmp_path):
    outsize.save(outsize.load(directory / "llama", weights="int4"), directory / "int4")
    file = directory / "int4" / "model.safetensors"
    name = "model.layers.1.mlp.up_proj.codes"
    header, raw = read_header(file), bytearray(file.read_bytes())
    assert read_tensor(header, name).dtype == torch.uint8
    at = header.entries[name].start
    raw[at : at + 2] = b"\x80\x7f"  # infinity in bfloat16
    file.write_bytes(raw)
    (directory / "int4" / "outsize.json").unlink()
    with pytest.raises(OutsizeError, match=r"blocks\.1\.mlp\.up\.codes: its scales are not finite"):
        outsize.load(directory / "int4")
    said = json.loads((directory / "llama" / "config.json").read_text())
    for theirs in ({"quant_method": "gptq", "bits": 4}, "awq", {"quant_method": "outsize"}):
        with pytest.raises(OutsizeError, match="quantization_config has quant_method"):
            parse({**said, "quantization_config": theirs})


def test_an_adapter_is_not_merged_into_codes(directory):
    model = outsize.load(directory / "llama", weights="int4")
    with pytest.raises(OutsizeError, match="weights='plain'"):
        outsize.merge(outsize.adapt(model, {"lora": {"rank": 2}}))


def test_initial_values_are_those_of_the_plain_model():
    config = quantised("llama", "int8:16", **SIZES)
    model, whole = build(config, seed=3), build(plain(config), seed=3)
    first = dict(linears(whole))
    for name, one in linears(model):
        found = one.decoded(0, one.sizes[0], torch.float32)
        torch.testing.assert_close(found, first[name].weight, rtol=0, atol=1e-3)
    assert torch.equal(model.prologue.tokens.weight, whole.prologue.tokens.weight)


def test_a_run_goes_on_beside_its_own_base_alone(directory):
    """Its checkpoint has no weights of the base, and knows them."""
    (directory / "text.txt").write_text("A few words, again and again. " * 40)
    keys = {
        "model": directory / "llama", "adapt.lora.rank": 2, "weights": "nf4", "train.steps": 1,
        "train.sequence": 16, "train.batch_tokens": 32, "train.evaluate_every": 0,
        "sample.tokens": 0, "data": directory / "text.txt", "data.validation": 0,
        "data.tokenizer": "bytes", "output": directory / "run",
    }  # fmt: skip
    sets = [x for name, value in keys.items() for x in ("--set", f"{name}={value}")]
    found = CliRunner().invoke(main, ["train", *sets])
    assert found.exit_code == 0, found.output
    assert not (directory / "run" / "step-00000001" / "model.safetensors").exists()
    assert outsize.load(directory / "run").config.coding.format.name == "nf4"
    merged = outsize.merge(outsize.load(directory / "run", weights="plain"))
    assert merged.config.adapter is None and merged.config.coding is None
    file = directory / "llama" / "model.safetensors"
    raw = bytearray(file.read_bytes())
    raw[-300:] = bytes(300)
    file.write_bytes(raw)
    again = CliRunner().invoke(
        main, ["train", "--resume", str(directory / "run"), "--set", "train.steps=2"]
    )
    assert again.exit_code == 2
    assert "holds other weights than those that the adapter" in again.output
