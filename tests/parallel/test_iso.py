"""Prompts in two halves over workers: the logits of one worker, and who waits for whom."""

from __future__ import annotations

import copy

import pytest
import torch
from tensor_split import filled
from threads import play

from outsize.collectives import Mesh, along
from outsize.decode.cache import KeyValueCache
from outsize.decode.generate import direct, generate, generate_many
from outsize.decode.samplers import Sampling
from outsize.errors import OutsizeError
from outsize.parallel.iso import in_halves, part_of
from outsize.parallel.overlap import Overlap, overlap_of
from outsize.parallel.tensor import split

SIZES = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 45, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
GEMMA = {"head_dim": 8, "sliding_window": 6, "query_pre_attn_scalar": 8}
FAMILIES = {
    "llama": {**SIZES, "attention_bias": True, "mlp_bias": True},
    "olmo2": SIZES,
    "gemma2": {**SIZES, **GEMMA},
    "gpt2": {"vocab_size": 61, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 60},
    "gpt_neox": SIZES,
    "qwen3_moe": {
        **SIZES, "moe_intermediate_size": 19, "num_experts_per_tok": 2, "num_experts": 8,
        "head_dim": 8,
    },
    "deepseek_v3": {
        **SIZES, "moe_intermediate_size": 19, "num_experts_per_tok": 2, "num_key_value_heads": 4,
        "n_routed_experts": 8, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1,
        "kv_lora_rank": 10, "q_lora_rank": 14, "qk_rope_head_dim": 4, "qk_nope_head_dim": 6,
        "v_head_dim": 8,
    },
}  # fmt: skip
DYNAMIC = {
    **SIZES, "max_position_embeddings": 8,
    "rope_scaling": {"rope_type": "dynamic", "factor": 2.0},
}  # fmt: skip


def over(model, size, work):
    """work(forward of a cut model, the model) on every worker."""

    def run(world):
        mine, way = copy.deepcopy(model), overlap_of(world, 1)
        assert way is not None
        split(mine, along(world, "tensor"))
        return work(in_halves(mine, way, least=4), mine)

    return play(Mesh(tensor=size), run)


def steps(forward) -> list[torch.Tensor]:
    """Logits of steps that feed several sequences: new ones, ones that go on, single tokens."""
    cache, given = KeyValueCache(3, 60), []
    plan = [([0, 1], [9, 4]), ([0, 2], [5, 8]), ([1, 2, 0], [1, 6, 1]), ([0, 1, 2], [1, 1, 1])]
    for turn, (slots, counts) in enumerate(plan):
        attend = cache.extend(slots, counts)
        ids = (torch.arange(sum(counts)) * 7 + turn) % 61
        with torch.no_grad():
            given.append(forward(ids, attend.positions(), attend.bounds, attend))
    return given


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", [*FAMILIES, "llama, dynamic"])
def test_logits_of_every_step(name, size):
    config = DYNAMIC if "dynamic" in name else FAMILIES[name]
    model = filled({**config, "model_type": name.partition(",")[0]})
    expected = steps(direct(model))
    for found in over(model, size, lambda forward, _: steps(forward)):
        for mine, wanted in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, wanted, rtol=1e-10, atol=1e-10)


def test_generation():
    model = filled({**FAMILIES["llama"], "model_type": "llama"})
    prompts = [list(range(3, 20)), [5, 6], list(range(40, 49))]
    expected = [generate(model, prompt, 7) for prompt in prompts]
    sampling = [Sampling()] * 3

    def work(forward, mine):
        each = [generate(mine, prompt, 7, forward=forward) for prompt in prompts]
        return each, generate_many(mine, prompts, 7, sampling, forward=forward)

    assert over(model, 2, work) == [(expected, expected)] * 2


def test_parts_of_a_step():
    cache = KeyValueCache(3, 30)
    cache.extend([1], [4])
    whole = cache.extend([0, 1, 2], [3, 6, 2], [0, 5, 1])
    first, second = part_of(whole, 0, 5), part_of(whole, 5, 11)
    assert (first.slots, first.starts, first.bounds) == ((0, 1), (0, 4), (0, 3, 5))
    assert (second.slots, second.starts, second.bounds) == ((1, 2), (6, 0), (0, 4, 6))
    positions = torch.cat([first.positions(), second.positions()])
    assert torch.equal(positions, whole.positions())
    assert first.lengths + second.lengths == (3, 15, 15, 3), "as long as they will be"


def test_a_half_computes_while_the_other_is_summed():
    """Of all sums but the last, none ends before the next branch has begun."""
    model, events = filled({**FAMILIES["llama"], "model_type": "llama"}), []

    class Axis:
        def __init__(self, axis) -> None:
            self.axis, self.size, self.rank = axis, axis.size, axis.rank

        def all_reduce(self, tensor, operation="sum"):
            if self.rank == 0:
                events.append(("sum", tensor.shape[0]))
            return self.axis.all_reduce(tensor, operation)

    def run(world):
        mine, way = copy.deepcopy(model), Axis(along(world, "tensor", "overlap"))
        split(mine, along(world, "tensor"))
        axis = along(world, "tensor")
        axis.calls.clear()
        forward = in_halves(mine, Overlap(way, 1), least=4)
        attend = KeyValueCache(1, 21).extend([0], [21])
        with torch.no_grad():
            forward(torch.arange(21), attend.positions(), attend.bounds, attend)
        return [size // (8 * 32) for name, size in axis.calls if name == "all_reduce"]

    found = play(Mesh(tensor=2), run)
    assert events == [("sum", 10), ("sum", 11)] * 4, "by turns, two a layer and half"
    assert found == [[10, 11]] * 2, "nothing else waits but the embeddings"


def test_a_ladder_is_refused():
    model = filled({**FAMILIES["llama"], "model_type": "llama", "ladder_from": 1})
    with pytest.raises(OutsizeError, match="sums beside its own branches"):
        over(model, 2, lambda forward, _: None)
