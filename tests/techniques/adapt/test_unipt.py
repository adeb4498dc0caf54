"""A side network on what frozen blocks took: a plain loop with its maths written out, plans, what
is kept, files, tokens, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import streamed
import torch
import transformers as hf
from plain import batches
from rates import known_hardware
from subjects import MIXED, SEQUENCE, VOCAB, base_plan, config_of
from torch.nn import functional as F
from verifying import fill

import outsize
from outsize.collectives import Mesh
from outsize.errors import OutsizeError
from outsize.memory import Ledger
from outsize.models.build import build, materialise, segments
from outsize.optim import AdamW
from outsize.parallel.check.decoder import Spread, check_decoder
from outsize.parallel.tensor.declared import boundaries
from outsize.parallel.tensor.rewired import check_wiring
from outsize.parallel.tensor.units import cuts_of
from outsize.plan import Pipelined, Precision, Rest, Sharding, Stage
from outsize.plan.plan import per_segment
from outsize.runtime import Job, NativeFlow
from outsize.runtime.making import NativeModel, make_job
from outsize.runtime.recipe import Here, Recipe
from outsize.search import PlanRequest, predict
from outsize.techniques.adapt.lora import Lora
from outsize.techniques.adapt.unipt import UniPT
from outsize.verify import Case, Native, verify

ADAPTER, STEPS, RATE = UniPT(6), 2, 1e-2
SIDE = "blocks.3.side"


def model_of(family, adapter=ADAPTER):
    model = build(replace(config_of(family), adapter=adapter), dtype=torch.float64)

    def filled(name, parameter):
        out = torch.empty(parameter.shape, dtype=torch.float64)
        fill(name, out)
        return out

    for segment, _ in segments(model):
        materialise(model, segment, filled)
    return model


def side(taken, x, own, bounds, causal=True):
    """What is added to the last block's output x (T, D), of what the blocks took."""
    small = [
        F.layer_norm(F.linear(one, own[f"down.{i}.weight"]), (ADAPTER.size,), eps=1e-5)
        for i, one in enumerate([*taken, x])
    ]
    *targets, anchor = small
    place = torch.arange(len(x))
    document = torch.bucketize(place, torch.tensor(bounds[1:]), right=True)
    sees = (document[:, None] == document) & ((place[:, None] >= place) | (not causal))
    merged, scores = [], []
    for target in targets:
        score = anchor @ target.T / ADAPTER.size**0.5
        weight = score.masked_fill(~sees, float("-inf")).softmax(-1)
        merged.append(weight @ target + target)
        scores.append((anchor * target) @ own["gate.weight"].T)
    share = torch.cat(scores, 1).softmax(1)
    mixed = sum(share[:, i : i + 1] * one for i, one in enumerate(merged))
    inner = anchor + F.layer_norm(mixed @ own["project.weight"].T, (ADAPTER.size,), eps=1e-5)
    return inner.relu() @ own["up.weight"].T


def losses_by_hand(family, data):
    base, whole = model_of(family, None), model_of(family)
    names = [n for n, p in whole.named_parameters() if p.requires_grad]
    assert names and all(name.startswith(SIDE) for name in names)
    own = {n.removeprefix(f"{SIDE}."): whole.get_parameter(n) for n in names}
    optimizer = torch.optim.AdamW(own.values(), RATE, betas=(0.9, 0.95), weight_decay=0.1, eps=1e-4)
    for batch in data:
        with torch.no_grad():
            ctx = base.context(batch.positions().reshape(-1), batch.flat_bounds())
            x, taken = base.prologue(batch.ids_BS.reshape(-1), ctx), []
            for block in base.blocks:
                taken.append(x)
                x = block(x, ctx)
        optimizer.zero_grad()
        logits = base.epilogue.logits(base.epilogue(x + side(taken, x, own, ctx.bounds), ctx))
        loss = F.cross_entropy(logits, batch.targets_BS.reshape(-1), ignore_index=-100)
        loss.backward()
        optimizer.step()
        yield loss.item(), {f"{SIDE}.{n}": p.detach() for n, p in own.items()}


@pytest.mark.parametrize("family", ["gemma2", "gpt2"])
def test_a_job_is_the_same_maths_in_a_plain_loop(family):
    data = batches(STEPS, 3, SEQUENCE, VOCAB)
    plan = base_plan(microbatch_rows=2, segments=6, stages=per_segment(6))
    job = Job(NativeFlow(model_of(family), plan), plan, Recipe(AdamW(weight_decay=0.1, eps=1e-4)))
    for batch, (loss, weights) in zip(data, losses_by_hand(family, data), strict=True):
        assert float(job.step(batch, RATE)) == pytest.approx(loss, rel=1e-10)
        found = streamed.snapshot(job)[0]
        for name, weight in weights.items():
            torch.testing.assert_close(found[name], weight, rtol=1e-10, atol=1e-10)


PLANS = {
    "recompute, states below": {
        "stages": tuple(replace(s, rest=Rest("disk")) for s in per_segment(6, ("block",))),
        "microbatch_rows": 2, "order": "layer",
    },
    "one stage": {"stages": (Stage(0, 6),), "mlp_tile": 6, "loss_chunk": 7},
    "data, all cut": {
        "mesh": Mesh(data=2), "shards": Sharding(2, 2, 2),
        "stages": (*MIXED[:-1], Stage(4, 5), Stage(5, 6)),
    },
    "tensor, context": {"mesh": Mesh(tensor=2, context=2), "overlap": 2},
}  # fmt: skip


@pytest.mark.parametrize("plan", PLANS)
def test_a_plan_trains_as_plain_pytorch(plan):
    made = base_plan(**{"segments": 6, "stages": per_segment(6), **PLANS[plan]})
    data = batches(2, made.rows, SEQUENCE, VOCAB)
    steps = 2 if "states below" in plan else 1
    config = replace(config_of("gemma2"), adapter=ADAPTER)
    case = Case(
        Native(config, lambda: fill), made, AdamW(1e-2, eps=1e-4), lambda step: data[step], steps,
        0.5,
    )  # fmt: skip
    found = verify(case, own=False)
    assert found.holds, found
    names = {row.name for row in found.exact.rows}
    assert names and all(name.startswith(SIDE) for name in names)


@pytest.mark.parametrize("family", ["gemma2", "gpt2"])
def test_the_checker_passes_its_layouts_and_sees_a_wrong_one(family):
    config, size = replace(config_of(family), adapter=ADAPTER), 3 if family == "gpt2" else 2
    cuts = cuts_of(build(config), size, 0, False)

    def found(cuts):
        return check_decoder(config, size, Spread(cuts, boundaries(False)))

    assert not found(cuts)
    name = f"{SIDE}.project.weight"
    assert found({**cuts, name: replace(cuts[name], partial=True)})


def peak_of(adapter, layers):
    """Bytes at the peak of a step beyond what the job holds between steps, as foretold too."""
    config = config_of("llama", hidden_size=64, intermediate_size=160, num_hidden_layers=layers)
    config = replace(config, adapter=adapter)
    size = len(config.layers) + 2
    plan = base_plan(
        "float32", rows=4, microbatch_rows=4, sequence=32, loss_chunk=32, segments=size,
        stages=per_segment(size),
    )  # fmt: skip
    recipe, ledger = Recipe(AdamW()), Ledger()
    job = make_job(NativeModel(build(config, 1)), plan, recipe, Here(ledger=ledger))
    for batch in batches(2, 4, 32, VOCAB):
        job.step(batch, 1e-3)
    trace = job.report.trace
    if layers > 2:
        return trace.peak() - sum(trace.events[-1].live.values())
    request = PlanRequest(
        4, 32, Precision.named("float32"), recipe.optimizer, None, documents=(0, 32)
    )
    foretold = predict(config, request, plan, known_hardware()).peak
    assert foretold == pytest.approx(trace.peak(), rel=0.02)
    return trace.peak() - sum(trace.events[-1].live.values())


def test_a_block_keeps_what_it_took_alone():
    """64 features of 128 tokens in float32, and 8 times 4 of the side network at most."""
    side, low_rank = (
        (peak_of(adapter, 4) - peak_of(adapter, 2)) / 2 for adapter in (UniPT(4), Lora(4))
    )
    assert 64 * 128 * 4 <= side < (64 + 8 * 4) * 128 * 4
    assert side < 0.15 * low_rank


def test_files_give_the_same_and_tokens_are_those_of_the_whole_sequence(tmp_path):
    outsize.save(build(config_of("llama, untied"), 3), tmp_path / "base")
    model, ids = outsize.load(tmp_path / "base"), torch.arange(9)[None]
    before = model(ids)
    outsize.adapt(model, "unipt", size=5)
    assert torch.equal(model(ids), before), "it begins as it was"
    with torch.no_grad():
        up = model.get_parameter(f"{SIDE}.up.weight")
        up.normal_(std=0.3, generator=torch.Generator().manual_seed(2))
    outsize.save(model, tmp_path / "adapter")
    again = outsize.load(tmp_path / "adapter")
    assert again.config.adapter == UniPT(5)
    assert torch.equal(again(ids), model(ids)) and not torch.allclose(model(ids), before)
    whole = [1, 2, 3]
    for _ in range(5):
        whole.append(int(model(torch.tensor([whole]))[0, -1].argmax()))
    assert outsize.generate(again, [1, 2, 3], 5) == whole[3:]
    with outsize.engine(again, context=16, requests=2) as engine:
        first, second = engine.generate([[1, 2, 3], [4, 5]], max_tokens=5)
    assert first == whole[3:] and second == outsize.generate(again, [4, 5], 5)
    with pytest.raises(OutsizeError, match="no weight of the model can take up"):
        outsize.merge(model)
    assert torch.equal(outsize.remove_adapter(model)(ids), before)
    assert model.config.layers == config_of("llama, untied").layers
    assert all(p.requires_grad for p in model.parameters())


def test_what_is_refused():
    def flow(**changes):
        return NativeFlow(model_of("llama"), base_plan(segments=6, **changes))

    with pytest.raises(OutsizeError, match=r"mesh\.pipeline is set, and the adapter's"):
        flow(mesh=Mesh(pipeline=2), pipeline=Pipelined("1f1b"), stages=per_segment(6))
    with pytest.raises(OutsizeError, match=r"sequence_chunk is set, and the adapter's side"):
        flow(sequence_chunk=6, stages=per_segment(6, ("block",)))
    with pytest.raises(OutsizeError, match=r"sequence_parallel is set, and the adapter's side"):
        check_wiring(replace(config_of("llama"), adapter=ADAPTER), 2, True)
    with pytest.raises(OutsizeError, match="the model has ladder_from"):
        build(replace(config_of("llama", ladder_from=1), adapter=ADAPTER))


def hf_of(kind):
    torch.manual_seed(3)
    sizes = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2,
             "intermediate_size": 24, "attn_implementation": "sdpa"}  # fmt: skip
    if kind == "vit":
        config = hf.ViTConfig(image_size=8, patch_size=4, num_labels=5, **sizes)
        model = hf.ViTForImageClassification(config)
    else:
        config = hf.LlamaConfig(vocab_size=VOCAB, num_key_value_heads=1, **sizes)
        model = hf.LlamaForCausalLM(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model.double().eval()


def asked(kind):
    draw = torch.Generator().manual_seed(4)
    if kind == "vit":
        return {"pixel_values": torch.randn(2, 3, 8, 8, dtype=torch.float64, generator=draw)}
    ids = torch.randint(0, VOCAB, (2, 7), generator=draw)
    return {"input_ids": ids, "attention_mask": torch.tensor([[1] * 7, [1] * 5 + [0] * 2])}


@pytest.mark.parametrize("kind", ["vit", "llama"])
def test_a_module_that_nobody_here_wrote_has_it_too(kind, tmp_path):
    """Blocks of a twin are hooked, and what is added is written out, row by row; trained, in files,
    taken out."""
    batch, said = asked(kind), {"size": 6, "sees": "all" if kind == "vit" else "earlier"}
    model, twin = hf_of(kind), hf_of(kind).requires_grad_(False)
    before = model(**batch).logits
    outsize.adapt(model, "unipt", **said)
    assert torch.equal(model(**batch).logits, before), "it begins as it was"
    own = {n.partition(".wrapped.side.")[2]: p for n, p in trained(model)}
    torch.manual_seed(5)
    for parameter in own.values():
        parameter.data.normal_(std=0.3)
    blocks, taken = twin.base_model.layers, []
    for block in blocks:
        block.register_forward_pre_hook(lambda _, args: taken.append(args[0]))

    def added(_, __, x):
        rows = range(len(x))
        every = [
            side([one[i] for one in taken], x[i], own, (0, x.shape[1]), kind != "vit") for i in rows
        ]
        return x + torch.stack(every)

    blocks[-1].register_forward_hook(added)
    real = batch.get("attention_mask", torch.ones(2, 1)).bool()
    found, expected = (one(**batch).logits for one in (model, twin))
    if kind == "llama":
        found, expected = found[real], expected[real]
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    assert not torch.allclose(found, before[real] if kind == "llama" else before)
    gradients = [torch.autograd.grad(x.square().sum(), own.values()) for x in (found, expected)]
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-10)

    outsize.save(model, tmp_path / "made", adapter_only=True)
    again = outsize.adapt(hf_of(kind), tmp_path / "made")
    assert torch.equal(again(**batch).logits, model(**batch).logits)
    with pytest.raises(OutsizeError, match="no weight of the model can take up"):
        outsize.merge(again)
    assert torch.equal(outsize.remove_adapter(again)(**batch).logits, before)
    labels = {"labels": batch["input_ids"] if kind == "llama" else torch.tensor([1, 3])}
    loss = float(model(**batch, **labels).loss.detach())
    job = outsize.prepare(model, torch.optim.SGD([p for _, p in trained(model)], 1e-3))
    losses = [float(job.step({**batch, **labels})) for _ in range(3)]
    assert losses[0] == pytest.approx(loss, rel=1e-10) and losses[2] < losses[1] < losses[0]


def trained(model):
    return [(name, p) for name, p in model.named_parameters() if p.requires_grad]


def test_a_module_refuses_what_its_blocks_cannot_tell():
    model, batch = outsize.adapt(hf_of("llama"), "unipt"), asked("llama")
    ids = batch["input_ids"]
    with pytest.raises(OutsizeError, match="cache holds earlier tokens"):
        model.generate(ids, max_new_tokens=3)
    plain = hf_of("llama").generate(ids, max_new_tokens=3)
    assert torch.equal(model.generate(ids, max_new_tokens=3, use_cache=False), plain)
    with pytest.raises(OutsizeError, match="a block was not given what the one before gave"):
        model.model.layers[1](torch.zeros(1, 2, 16))
    with pytest.raises(OutsizeError, match=r"take \[4, 8\] features; expected blocks of one width"):
        outsize.adapt(torch.nn.Sequential(*(torch.nn.Linear(n, 8) for n in (4, 8))), "unipt")
    with pytest.raises(OutsizeError, match="which are for modules of others"):
        outsize.adapt(build(config_of("llama"), 1), "unipt", sees="all")
