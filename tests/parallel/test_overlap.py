"""Products in chunks beside their sums: the numbers of one worker, and who waits for whom."""

from __future__ import annotations

import copy
import gc
import threading

import pytest
import torch
from plain import batches
from tensor_split import filled, one_pass, played, reference, whole
from threads import play

from outsize.collectives import Mesh, along
from outsize.collectives.courier import Courier
from outsize.errors import OutsizeError
from outsize.parallel.tensor.decoder import split
from outsize.parallel.tensor.overlap import Overlap, overlap_of
from outsize.plan import Plan, Precision, Rest, Stage
from outsize.plan.plan import per_segment
from outsize.torch_private import FakeTensorMode

SIZES = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 45, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32,
}  # fmt: skip
EXPERTS = {"moe_intermediate_size": 19, "num_experts_per_tok": 2, "num_key_value_heads": 4}
FAMILIES = {
    "llama": SIZES,
    "llama, biases": {**SIZES, "attention_bias": True, "mlp_bias": True},
    "gemma2": {**SIZES, "head_dim": 8, "sliding_window": 6, "query_pre_attn_scalar": 8},
    "gpt2": {"vocab_size": 61, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 30},
    "gpt_neox": SIZES,
    "opt": {**SIZES, "ffn_dim": 45},
    "deepseek_v3": {
        **SIZES, **EXPERTS, "n_routed_experts": 8, "n_group": 4, "topk_group": 2,
        "first_k_dense_replace": 1, "kv_lora_rank": 10, "q_lora_rank": 14, "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 6, "v_head_dim": 8,
    },
}  # fmt: skip
ROWS, TOKENS = 3, 13
BATCH = batches(1, ROWS, TOKENS, 61)[0]


def config_of(name: str):
    return {**FAMILIES[name], "model_type": name.partition(",")[0]}


def plan_of(**changes) -> Plan:
    usual = {"stages": per_segment(4), "microbatch_rows": 2, "loss_chunk": 7}
    usual |= {"rows": ROWS, "sequence": TOKENS, "precision": Precision.named("float64")}
    return Plan(4, **{**usual, **changes})


def close(parts, model, batch) -> None:
    """Loss and gradients are those of plain logits and autograd."""
    loss, gradients = reference(model, batch)
    assert abs(parts[0].loss - loss) <= 1e-12 * abs(loss)
    largest = max(float(g.abs().max()) for g in gradients.values() if g is not None)
    for name, expected in gradients.items():
        mine = whole(parts, name)
        if expected is None:
            assert mine is None or not mine.any(), name
            continue
        limit = 1e-10 * max(float(expected.abs().max()), 1e-3 * largest)
        assert mine is not None and float((mine - expected).abs().max()) <= limit, name


# Plain llama and tied heads: tests/verify/test_matrix.py.
BOTH = ("llama, biases", "deepseek_v3")


@pytest.mark.parametrize(
    ("name", "sequence_parallel"),
    [
        *((name, way) for name in BOTH for way in (False, True)),
        ("gemma2", True), ("gpt2", False), ("gpt_neox", True), ("opt", False),
    ],
)  # fmt: skip
def test_families_that_are_cut_otherwise(name, sequence_parallel):
    model = filled(config_of(name))
    close(played(model, plan_of(), BATCH, 2, sequence_parallel, chunks=3), model, BATCH)


@pytest.mark.parametrize(
    ("size", "chunks", "sequence_parallel"), [(2, 1, False), (2, 64, True), (4, 2, True)]
)
def test_sizes(size, chunks, sequence_parallel):
    model = filled(config_of("llama, biases"))
    close(played(model, plan_of(), BATCH, size, sequence_parallel, chunks=chunks), model, BATCH)


def test_frozen_parts():
    model = filled(config_of("llama"))
    for name, p in model.named_parameters():
        p.requires_grad_(name.startswith("blocks.1") and "mlp.up" not in name)
    for sequence_parallel in (False, True):
        close(played(model, plan_of(), BATCH, 2, sequence_parallel, chunks=2), model, BATCH)


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["", "sequence"])
def test_sums_and_bytes_are_those_without_chunks(sequence_parallel):
    """Integers all along: products are exact, so that any difference is one of a sum. As many bytes
    are received; what was one operation is one a chunk."""
    model, whole_TD = filled(config_of("opt")), torch.arange(12 * 32.0).view(12, 32) % 7
    with torch.no_grad():
        for p in model.parameters():
            p.copy_((p * 3).round())

    def work(world):
        given = []
        for chunks in (0, 3):
            mine, way = copy.deepcopy(model), overlap_of(world, chunks) if chunks else None
            axis = along(world, "tensor")
            split(mine, axis, sequence_parallel, beside=way)
            groups = [axis] if way is None else [axis, way.axis]
            for group in groups:
                group.received.clear(), group.calls.clear()
            mlp = mine.blocks[0].mlp
            x_TD = whole_TD.double()
            if sequence_parallel:
                x_TD = x_TD.chunk(2)[world.rank]
            ctx = mine.context(torch.arange(12), (0, 12))
            y_TD = mlp(x_TD, ctx)
            total = sum(sum(group.received.values()) for group in groups)
            given.append((y_TD.detach(), total, sum(len(group.calls) for group in groups)))
        return given

    for plain, chunked in play(Mesh(tensor=2), work):
        assert torch.equal(chunked[0], plain[0]) and chunked[0].any()
        assert chunked[1] == plain[1]
        assert chunked[2] == 3 * plain[2]


class Held:
    """An axis whose every call waits for a word, and says when it has begun."""

    def __init__(self, axis) -> None:
        self.axis, self.size, self.rank = axis, axis.size, axis.rank
        self.begun, self.go = threading.Semaphore(0), threading.Semaphore(0)

    def all_reduce(self, tensor, operation="sum"):
        self.begun.release()
        assert self.go.acquire(timeout=600)
        return self.axis.all_reduce(tensor, operation)


def test_a_chunk_is_multiplied_while_another_is_summed(monkeypatch):
    """The second product is made while the first sum stands still: were they one after the other,
    this would never end."""
    from outsize.kernels import product

    plain, model = product.put_product, filled(config_of("llama"))
    held = {}

    def watched(a, b, out):
        way = held[threading.current_thread()]
        plain(a, b, out)
        made = way.made = way.made + 1
        if made == 1:
            return
        assert way.begun.acquire(timeout=600)
        way.go.release()

    monkeypatch.setattr(product, "put_product", watched)

    def work(world):
        mine, way = copy.deepcopy(model), Held(along(world, "tensor", "beside"))
        way.made = 0
        held[threading.current_thread()] = way
        way.go.release()  # for the last chunk
        split(mine, along(world, "tensor"), beside=Overlap(way, 3))
        ctx = mine.context(torch.arange(12), (0, 12))
        with torch.no_grad():
            return mine.blocks[0].mlp(torch.ones(12, 32, dtype=torch.float64), ctx)

    expected = model.blocks[0].mlp(torch.ones(12, 32, dtype=torch.float64))
    for found in play(Mesh(tensor=2), work):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_weight_gradients_are_made_beside_the_sum_of_the_inputs():
    model, order = filled(config_of("llama")), []

    class Axis:
        def __init__(self, axis) -> None:
            self.axis, self.size, self.rank = axis, axis.size, axis.rank
            self.back, self.made = False, threading.Event()

        def all_reduce(self, tensor, operation="sum"):
            assert not self.back or self.made.wait(600), "the gradients wait for the sum"
            return self.axis.all_reduce(tensor, operation)

    def work(world):
        mine, way = copy.deepcopy(model), Axis(along(world, "tensor", "beside"))
        split(mine, along(world, "tensor"), beside=Overlap(way, 2))
        mlp = mine.blocks[0].mlp

        def sink(weight, compute) -> None:
            order.append(weight is mlp.down.weight)
            if weight is mlp.gate.weight or weight is mlp.up.weight:
                way.made.set()

        for one in (mlp.gate, mlp.up, mlp.down):
            one.sink = sink
        x_TD = torch.ones(12, 32, dtype=torch.float64, requires_grad=True)
        y_TD = mlp(x_TD, mine.context(torch.arange(12), (0, 12)))
        way.back = True
        y_TD.sum().backward()

    play(Mesh(tensor=2), work)
    assert order.count(True) == 2 and len(order) == 6


def test_a_failed_sum_is_raised_where_it_is_waited_for():
    class Broken:
        size, rank = 2, 0

        def all_reduce(self, tensor, operation="sum"):
            raise OutsizeError("rank 1 is gone")

    courier = Courier()
    flight = courier.send(lambda: Broken().all_reduce(None), torch.device("cpu"))
    with pytest.raises(OutsizeError, match="rank 1 is gone"):
        flight.wait()
    courier.send(lambda: None, torch.device("cpu")).wait()  # and goes on


def test_a_rehearsal_has_one_thread():
    """Fake tensors of two threads race for the one mode that both need: an error, at times."""
    ran = list[int]()
    with FakeTensorMode():
        x = torch.empty(2, 2)
        Courier().send(lambda: ran.extend((threading.get_ident(), *(x + x).shape)), x.device).wait()
    assert ran == [threading.get_ident(), 2, 2]


def test_threads_end_with_the_model():
    def couriers() -> int:
        return sum(thread.name == "courier" for thread in threading.enumerate())

    gc.collect()
    before = couriers()
    model = filled(config_of("llama"))
    played(model, plan_of(), BATCH, 2, False, chunks=2)
    gc.collect()
    for thread in threading.enumerate():
        if thread.name == "courier":
            thread.join(600)
    assert couriers() <= before


def test_plain_autograd_without_a_sink():
    model = filled(config_of("llama, biases"))

    def work(world):
        mine = copy.deepcopy(model)
        cuts = split(mine, along(world, "tensor"), True, beside=overlap_of(world, 3))
        ids = torch.arange(24) % 61
        ctx = mine.context(torch.arange(24), (0, 24))
        mine.hidden(ids, ctx).square().sum().backward()
        return {n: (cuts[n], p.grad) for n, p in mine.named_parameters()}

    ctx = model.context(torch.arange(24), (0, 24))
    model.hidden(torch.arange(24) % 61, ctx).square().sum().backward()
    found = play(Mesh(tensor=2), work)
    for name in ("blocks.1.mlp.down.weight", "blocks.0.attention.q.bias", "blocks.0.mlp.up.weight"):
        expected = dict(model.named_parameters())[name].grad
        for parts in found:
            cut, mine = parts[name]
            # The head's input sums over both workers what each of them made of all of it.
            torch.testing.assert_close(mine, 2 * cut.of(expected), rtol=1e-9, atol=1e-9)


def test_one_pass_without_gradients():
    model = filled(config_of("llama"))

    def work(world):
        mine = copy.deepcopy(model)
        split(mine, along(world, "tensor"), beside=overlap_of(world, 3))
        return one_pass(mine, plan_of(), BATCH, 1 / BATCH.count(), train=False)

    expected = one_pass(model, plan_of(), BATCH, 1 / BATCH.count(), train=False)
    assert play(Mesh(tensor=2), work) == pytest.approx([expected] * 2, rel=1e-12)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"overlap": 2}, "overlap is 2, but mesh.tensor is 1"),
        ({"overlap": -1}, "overlap is -1; expected 0 or more"),
        (
            {
                "overlap": 2, "mesh": Mesh(tensor=2), "sequence_parallel": True,
                "stages": tuple(Stage(i, i + 1, rest=Rest(activations="host")) for i in range(4)),
            },
            "activations rest below the device",
        ),
    ],
)  # fmt: skip
def test_plans_that_cannot_be(changes, words):
    with pytest.raises(OutsizeError, match=words):
        plan_of(**changes)
