"""The checker on native decoders: their table passes, what is taken from it is missed."""

import subprocess
import sys
from dataclasses import replace

import pytest
from subjects import CONFIGS, config_of

from outsize.models.build import build
from outsize.models.cuts import Cut
from outsize.parallel.check import decoder as decoders
from outsize.parallel.check.decoder import Spread, check_decoder
from outsize.parallel.layouts import REPLICATED
from outsize.parallel.tensor.declared import FANNED, WHOLE, Boundary, boundaries
from outsize.parallel.tensor.units import cuts_of

SIZES = {"gpt2": (3,)}  # three heads; the others have four


def spread_of(config, size, sequence_parallel=False, **changes):
    cuts = cuts_of(build(config), size, 0, sequence_parallel)
    return Spread(cuts | changes, boundaries(sequence_parallel))


def findings(name, size=2, sequence_parallel=False, drop=None, cuts=None, config=None):
    config = config or config_of(name)
    spread = spread_of(config, size, sequence_parallel, **(cuts or {}))
    kept = tuple(b for b in spread.boundaries if drop is None or (b.module, b.edge) != drop)
    return check_decoder(config, size, replace(spread, boundaries=kept))


@pytest.mark.parametrize(
    ("name", "size", "sequence_parallel"),
    [(c, n, (i + j) % 2 == 0) for i, c in enumerate(CONFIGS)
     for j, n in enumerate(SIZES.get(c, (2, 4)))],
)  # fmt: skip
def test_every_family_passes(name, size, sequence_parallel):
    assert findings(name, size, sequence_parallel) == ()


def test_whole_norms_and_biases_pass():
    olmo = {"model_type": "olmo2", "vocab_size": 53, "hidden_size": 24, "intermediate_size": 40,
            "num_hidden_layers": 2, "num_attention_heads": 4}  # fmt: skip
    from outsize.models.families import parse

    assert findings("olmo2", 2, config=parse(olmo)) == ()


@pytest.mark.parametrize(
    ("name", "drop", "module", "missing"),
    [
        ("llama", ("blocks.*.attention", "input"), "blocks.0.attention", "all_reduce of the grad"),
        ("llama", ("blocks.*.mlp", "output"), "blocks.0", "all_reduce"),
        ("gpt2", ("blocks.*.mlp", "output"), "blocks.0.mlp.down", "all_reduce"),
        ("llama", ("prologue.tokens", "output"), "blocks.0", "all_reduce"),
        ("llama", ("epilogue", "output"), "epilogue", "all_reduce of the gradient"),
        ("mixtral", ("blocks.*.mlp", "output"), "blocks.0", "all_reduce"),
    ],
)
def test_a_missing_boundary_is_named(name, drop, module, missing):
    found = findings(name, SIZES.get(name, (2,))[0], drop=drop)
    assert found
    assert any(f.module.startswith(module) and missing in f.missing for f in found), [
        *map(str, found)
    ]


def test_the_gradient_of_a_router_must_be_partial():
    """torchtitan 2387 and 4054."""
    name = "blocks.1.mlp.router.score.weight"
    found = findings("mixtral", cuts={name: Cut((6, 24), shared=2, partial=False)})
    assert [(f.module, f.tensor) for f in found] == [("blocks.1.mlp.router.score", "weight")]
    assert found[0].missing == "all_reduce of the gradient"


def test_a_shared_head_must_be_partial_and_counted_once():
    cut = Cut((12, 24), 0, ((0, 6),), shared=2, partial=True)
    assert findings("llama", 4) == ()
    name = "blocks.2.attention.k.weight"
    found = findings("llama", 4, cuts={name: replace(cut, partial=False)})
    assert [(f.module, f.missing) for f in found] == [
        ("blocks.2.attention.k", "all_reduce of the gradient")
    ]
    found = findings("llama", 4, cuts={name: replace(cut, shared=1)})
    assert any("the norm counts" in f.what and f.module == "blocks.2.attention.k" for f in found)


def test_norms_under_sequence_parallelism_must_be_partial():
    name = "blocks.0.mlp_norm.weight"
    found = findings("llama", sequence_parallel=True, cuts={name: Cut((24,), shared=2)})
    assert [(f.module, f.missing) for f in found] == [
        ("blocks.0.mlp_norm", "all_reduce of the gradient")
    ]
    found = findings("llama", cuts={name: Cut((24,), shared=2, partial=True)})
    assert [f.module for f in found] == ["blocks.0.mlp_norm"] and "2 times too large" in found[
        0
    ].what


def test_a_loss_that_takes_whole_logits_is_named():
    config = config_of("llama")
    found = check_decoder(config, 2, replace(spread_of(config, 2), logits=REPLICATED))
    assert (found[0].module, found[0].missing) == ("the loss", "all_gather")


def test_a_second_sum_of_the_gradient_is_named():
    config = config_of("llama")
    spread = spread_of(config, 2)
    more = (*spread.boundaries, Boundary("blocks.1", "input", WHOLE, FANNED))
    found = check_decoder(config, 2, replace(spread, boundaries=more))
    assert any(f.module == "blocks.1" and "2 times too large" in f.what for f in found)


def test_the_checker_imports_no_compiler():
    """In a process of its own, from the first call on. Its seconds: benchmarks/planning.py."""
    code = """
import sys
sys.path.insert(0, "tests/support")
from subjects import config_of
from outsize.models.build import build
from outsize.parallel.check.decoder import Spread, check_decoder
from outsize.parallel.tensor.declared import boundaries
from outsize.parallel.tensor.units import cuts_of
config = config_of("llama")
spread = Spread(cuts_of(build(config), 2, 0, False), boundaries(False))
assert check_decoder(config, 2, spread) == ()
print("torch._dynamo" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False", "the checker imported PyTorch's compiler"


def test_layers_are_not_checked_once_each(monkeypatch):
    config = config_of("llama")
    looked_at = []
    examined = decoders.examined

    def counted(graph, declared):
        looked_at.append(len(graph.nodes))
        return examined(graph, declared)

    monkeypatch.setattr(decoders, "examined", counted)
    for many in (1, 64):
        alike = replace(config, layers=config.layers[:1] * many)
        assert check_decoder(alike, 2, spread_of(alike, 2)) == ()
    assert looked_at[0] == looked_at[1] > 0
