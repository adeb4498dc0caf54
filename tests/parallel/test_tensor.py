"""A split decoder against the whole one, in float64: loss and every gradient, all families."""

from __future__ import annotations

import copy

import pytest
import torch
from plain import batches
from tensor_split import Part, filled, one_pass, played, reference, whole, wrapping
from threads import play

from outsize.collectives import Mesh, along
from outsize.collectives.pretend import Pretend
from outsize.data import Batch
from outsize.errors import OutsizeError
from outsize.kernels.entropy import PLAIN, LossOptions
from outsize.memory import Ledger
from outsize.models.build import build, shells
from outsize.models.families import parse
from outsize.parallel.tensor.decoder import split
from outsize.parallel.tensor.units import check, cuts_of
from outsize.plan import Plan, Precision, Stage
from outsize.plan.plan import per_segment

SIZES = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 45, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32,
}  # fmt: skip
EXPERTS = {"moe_intermediate_size": 19, "num_experts_per_tok": 2}
WINDOWS = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
GEMMA = {"head_dim": 8, "sliding_window": 6, "query_pre_attn_scalar": 8}
FAMILIES = {
    "llama": SIZES,
    "llama, tied": {**SIZES, "tie_word_embeddings": True},
    "llama, biases": {**SIZES, "attention_bias": True, "mlp_bias": True},
    "mistral": {**SIZES, "sliding_window": 5},
    "qwen2": {**SIZES, **WINDOWS},
    "qwen3": {**SIZES, **WINDOWS, "head_dim": 8},
    "phi3": SIZES,
    "olmo2": SIZES,
    "starcoder2": {**SIZES, "sliding_window": 5},
    "gemma2": {**SIZES, **GEMMA},
    "gemma3_text": {**SIZES, **GEMMA, "sliding_window_pattern": 2},
    "gpt2": {"vocab_size": 61, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 30},
    "gpt_neox": SIZES,
    "opt": {**SIZES, "ffn_dim": 45},
    "opt, narrow": {
        **SIZES, "ffn_dim": 45, "do_layer_norm_before": False, "word_embed_proj_dim": 12,
        "enable_bias": False,
    },
    "mixtral": {**SIZES, "num_local_experts": 4, "sliding_window": 5},
    # More experts than the tokens can choose: some are never used.
    "qwen3_moe": {**SIZES, **EXPERTS, "num_experts": 80, "head_dim": 8, "mlp_only_layers": [0]},
    "deepseek_v3": {
        **SIZES, **EXPERTS, "num_key_value_heads": 4, "n_routed_experts": 8, "n_group": 4,
        "topk_group": 2, "first_k_dense_replace": 1, "kv_lora_rank": 10, "q_lora_rank": 14,
        "qk_rope_head_dim": 4, "qk_nope_head_dim": 6, "v_head_dim": 8,
    },
    "deepseek_v3, plain queries": {
        **SIZES, **EXPERTS, "num_key_value_heads": 4, "n_routed_experts": 8, "n_group": 4,
        "topk_group": 2, "first_k_dense_replace": 1, "kv_lora_rank": 10, "q_lora_rank": None,
        "qk_rope_head_dim": 4, "qk_nope_head_dim": 6, "v_head_dim": 8, "tie_word_embeddings": True,
    },
}  # fmt: skip
THREE = {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 48}
ROWS, TOKENS = 3, 13


def config_of(name: str, **changes):
    return {**FAMILIES[name], "model_type": name.partition(",")[0], **changes}


def plan_of(**changes) -> Plan:
    usual = {"stages": per_segment(4), "microbatch_rows": 2, "loss_chunk": 7}
    usual |= {"rows": ROWS, "sequence": TOKENS, "precision": Precision.named("float64")}
    return Plan(4, **{**usual, **changes})


def close(parts: list[Part], model, batch, options=PLAIN) -> None:
    """Loss and gradients are those of plain logits and autograd."""
    loss, gradients = reference(model, batch, options)
    assert all(part.loss == parts[0].loss for part in parts), "one loss, bit for bit"
    assert abs(parts[0].loss - loss) <= 1e-12 * abs(loss)
    largest = max(float(g.abs().max()) for g in gradients.values() if g is not None)
    for name, expected in gradients.items():
        mine = whole(parts, name)
        if expected is None:
            assert mine is None or not mine.any(), name
            continue
        assert mine is not None, name
        # Some gradients are zero but for rounding (key biases without a rope).
        limit = 1e-10 * max(float(expected.abs().max()), 1e-3 * largest)
        assert float((mine - expected).abs().max()) <= limit, name


# Whole tokens where weights are cut otherwise than llama's: biases, tables of positions, experts.
WHOLE = ("llama, biases", "gpt2", "gemma2", "opt, narrow", "mixtral", "qwen3_moe", "deepseek_v3")


@pytest.mark.parametrize(
    ("name", "sequence_parallel"),
    [
        *((name, True) for name in FAMILIES if name not in ("llama", "mistral")),
        *((name, False) for name in WHOLE),
    ],
)
def test_every_family(name, sequence_parallel):
    """Documents of all lengths, a row without any target, uneven features, shared key heads."""
    size = 4  # two: tests/verify/test_matrix.py
    model, batch = filled(config_of(name)), batches(1, ROWS, TOKENS, 61)[0]
    close(played(model, plan_of(), batch, size, sequence_parallel), model, batch)


@pytest.mark.parametrize(
    ("name", "sequence_parallel"),
    [("llama, tied", False), ("olmo2", True), ("qwen3_moe", True)],
)
def test_three_workers(name, sequence_parallel):
    model, batch = filled(config_of(name, **THREE)), batches(1, ROWS, TOKENS, 61)[0]
    close(played(model, plan_of(), batch, 3, sequence_parallel), model, batch)


CHUNKS = {
    "sequence chunks": {"stages": per_segment(4, ("block",)), "sequence_chunk": 5},
    "chunks of all": {
        "stages": (Stage(0, 1), Stage(1, 3, ("block",)), Stage(3, 4)), "tile": 3,
        "loss_chunk": 4, "sequence_chunk": 6,
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("way", "name"),
    [
        ("sequence chunks", "olmo2"), ("chunks of all", "gemma2"),
        ("sequence chunks", "deepseek_v3"),
    ],
)  # fmt: skip
def test_chunks_of_the_sequence(way, name):
    model, batch = filled(config_of(name)), batches(1, ROWS, TOKENS, 61)[0]
    changes = dict(CHUNKS[way])
    wrap = wrapping(changes.pop("tile", 0))
    close(played(model, plan_of(**changes), batch, 2, False, wrap=wrap), model, batch)


@pytest.mark.parametrize(("name", "tokens"), [("llama", 1), ("opt", 3), ("mixtral", 2)])
def test_fewer_tokens_than_workers(name, tokens):
    """Some workers have no token of the residual stream at all."""
    model, plan = filled(config_of(name)), plan_of(rows=1, microbatch_rows=1, sequence=tokens)
    ids = torch.randint(0, 61, (2, 1, tokens))
    batch = Batch(ids[0], ids[1], ((0, tokens),))
    close(played(model, plan, batch, 4, True), model, batch)


@pytest.mark.parametrize(
    ("name", "options", "sequence_parallel"),
    [
        ("llama, tied", LossOptions(0.1), False), ("llama, tied", LossOptions(0.2, 0.01), True),
        ("gemma2", LossOptions(z_loss=0.03), True), ("gemma2", LossOptions(0.2, 0.01), False),
    ],
)  # fmt: skip
def test_terms_of_the_loss(name, options, sequence_parallel):
    model, batch = filled(config_of(name)), batches(1, ROWS, TOKENS, 61)[0]
    parts = played(model, plan_of(), batch, 2, sequence_parallel, options)
    close(parts, model, batch, options)


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["", "sequence"])
def test_evaluation_reports_the_plain_loss(sequence_parallel):
    model, batch = filled(config_of("llama")), batches(1, ROWS, TOKENS, 61)[0]
    expected, _ = reference(model, batch)

    def work(world):
        axis, mine = along(world, "tensor"), copy.deepcopy(model)
        split(mine, axis, sequence_parallel)
        options, factor = LossOptions(0.1, 0.01), 1 / batch.count()
        return one_pass(mine, plan_of(), batch, factor, options, train=False)

    losses = play(Mesh(tensor=2), work)
    assert losses[0] == losses[1] and abs(losses[0] - expected) <= 1e-12 * expected


@pytest.mark.parametrize(
    ("name", "sequence_parallel"),
    [
        ("llama, tied", False), ("gemma2", True), ("opt, narrow", False), ("deepseek_v3", True),
    ],
)  # fmt: skip
def test_logits_are_whole_on_every_worker(name, sequence_parallel):
    """The model's own call, and a gradient that comes from its logits."""
    model, ids = filled(config_of(name)), torch.randint(0, 61, (2, 9))
    pull = torch.randn(2, 9, 61, dtype=torch.float64)
    expected = model(ids)
    (expected * pull).sum().backward()

    def work(world):
        mine = copy.deepcopy(model)
        mine.zero_grad()
        cuts = split(mine, along(world, "tensor"), sequence_parallel)
        logits = mine(ids)
        (logits * pull).sum().backward()
        gradients = {n: p.grad for n, p in mine.named_parameters()}
        return logits.detach(), Part(0.0, gradients, cuts, [], {})

    found = play(Mesh(tensor=4), work)
    for logits, _ in found:
        torch.testing.assert_close(logits, expected.detach(), rtol=1e-10, atol=1e-10)
    largest = max(float(p.grad.abs().max()) for p in model.parameters() if p.grad is not None)
    for parameter, p in model.named_parameters():
        if p.grad is not None:
            mine = whole([part for _, part in found], parameter)
            torch.testing.assert_close(mine, p.grad, rtol=1e-9, atol=1e-12 * largest)


@pytest.mark.parametrize(
    ("name", "recompute", "size"),
    [
        ("llama", (), 4), ("qwen3_moe", ("block",), 2), ("deepseek_v3", (), 2),
        ("deepseek_v3", ("block",), 4),
    ],
)  # fmt: skip
def test_bytes_are_those_of_the_papers(name, recompute, size):
    """Two all-reduces of the hidden states a layer and direction (Megatron-LM, section 3), or a
    gather and a scatter of the same size each (sequence parallelism); three numbers a token for the
    loss. A block that is recomputed sends its forward bytes again."""
    model, batch = filled(config_of(name)), batches(1, ROWS, TOKENS, 61)[0]
    plan = plan_of(stages=per_segment(4, recompute), microbatch_rows=ROWS)
    hidden, layers = ROWS * TOKENS * 32 * 8, 2
    again = layers * 2 if recompute else 0
    sums = played(model, plan, batch, size, False)[0]
    scattered = played(model, plan, batch, size, True)[0]
    loss = size * 3 * ROWS * TOKENS * 8

    big = [call for call in sums.calls if call[0] == "all_reduce"]
    assert big == [("all_reduce", hidden)] * (1 + 2 * layers + 1 + 2 * layers + again)
    assert sum(b for kind, b in sums.calls if kind == "all_gather") == loss
    # The embedding's scatter goes back as a gather, the head's gather as a scatter.
    each = 1 + 2 * layers + 1 + 2 * layers + again
    kinds = [kind for kind, b in scattered.calls if b == hidden]
    assert kinds.count("reduce_scatter") == each and kinds.count("all_gather") == each
    assert {kind for kind, b in scattered.calls} == {"reduce_scatter", "all_gather"}


def heads(count: int, kv: int):
    return {"num_attention_heads": count, "num_key_value_heads": kv, "hidden_size": 48}


REFUSED = [
    (heads(6, 6), 4, "6 attention heads", 3),
    (heads(12, 4), 6, "4 key-value heads", 4),
    (heads(12, 4), 5, "12 attention heads", 4),
    ({"intermediate_size": 3}, 4, "3 inner features of the feed-forward network", 2),
    ({"vocab_size": 3}, 4, "3 tokens of the vocabulary", 2),
    ({}, 7, "4 attention heads", 4),
]


@pytest.mark.parametrize(("changes", "size", "what", "nearest"), REFUSED)
def test_sizes_that_cannot_be_cut_are_refused(changes, size, what, nearest):
    config = parse(config_of("llama", **changes))
    with pytest.raises(OutsizeError, match=what) as error:
        check(config, size)
    assert f"tensor is {size}" in str(error.value)
    assert str(error.value).endswith(f"the nearest that works is tensor={nearest}")
    check(config, nearest)


@pytest.mark.parametrize("name", FAMILIES)
def test_cuts_cover_every_element(name):
    """Of every parameter, each element lies on `shared` workers, and runs of those are neighbours;
    shells and meta parameters stay such."""
    config = parse(config_of(name))
    for size in (1, 2, 4):
        model = build(config, dtype=torch.float64)
        times = {n: torch.zeros(p.shape) for n, p in model.named_parameters()}
        for rank in range(size):
            for n, cut in cuts_of(model, size, rank, True).items():
                cut.of(times[n]).add_(1 / cut.shared)
                assert size % cut.shared == 0
        assert all((x - 1).abs().max() < 1e-6 for x in times.values())
        for made in (model, shells(config, torch.bfloat16, "cpu")):
            cuts = split(made, Pretend(size, size - 1), True)
            for n, p in made.named_parameters():
                assert tuple(p.shape) == cuts[n].local
                assert p.is_meta or p.untyped_storage().nbytes() == p.element_size(), n
            tied = made.epilogue.head.weight is made.prologue.tokens.weight
            assert tied == config.tied


def test_frozen_weights_get_nothing_and_the_rest_its_own():
    """Without gradients below, nobody waits for anybody: what is trained begins in one layer."""
    model, batch = filled(config_of("llama, biases")), batches(1, ROWS, TOKENS, 61)[0]
    for name, p in model.named_parameters():
        p.requires_grad_(name.startswith("blocks.1") and "mlp" not in name)
    for sequence_parallel in (False, True):
        close(played(model, plan_of(), batch, 2, sequence_parallel), model, batch)


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["", "sequence"])
def test_bfloat16_is_near_float64(sequence_parallel):
    model, batch = filled(config_of("llama", hidden_size=64)), batches(1, ROWS, TOKENS, 61)[0]
    with torch.no_grad():
        for p in model.parameters():
            p.copy_((p * 0.5).bfloat16())
    _, expected = reference(model, batch)
    parts = played(copy.deepcopy(model).bfloat16(), plan_of(), batch, 2, sequence_parallel)
    for name, g in expected.items():
        mine = whole(parts, name)
        assert float((mine - g).norm()) <= 0.05 * float(g.norm()), name


def kept(size: int, sequence_parallel: bool) -> int:
    """Bytes that a block keeps between its passes, on one worker of `size`."""
    config = parse({**config_of("llama"), "intermediate_size": 64, "num_key_value_heads": 4})
    model, tokens = build(config, seed=1, dtype=torch.float32), 64
    split(model, Pretend(size, 0), sequence_parallel)
    context = model.context(torch.arange(tokens), (0, tokens))
    here = tokens // size if sequence_parallel else tokens
    with Ledger() as ledger:
        x_TD = torch.randn(here, 32, requires_grad=True)
        before = ledger.total
        y_TD = model.blocks[0](x_TD * 1, context)
        found = ledger.total - before - y_TD.nbytes
        y_TD.sum().backward()
    assert x_TD.grad is not None and x_TD.grad.shape == x_TD.shape
    return found


@pytest.mark.parametrize("size", [2, 4])
def test_what_a_block_keeps_is_divided(size):
    """All that a block keeps is divided by the axis but its two gathered inputs (Korthikanti et
    al., 2022, equation 4, is without these)."""
    whole, gathered = kept(1, False), 2 * 64 * 32 * 4
    without = kept(size, True) - (gathered - gathered // size)
    assert abs(without - whole / size) <= 0.02 * whole / size
    assert kept(size, False) > kept(size, True)
