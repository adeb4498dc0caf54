"""Every method of adaptation in plans of every kind: it trains as plain PyTorch, in float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from adapting import METHODS
from plain import batches
from subjects import MIXED, SEQUENCE, VOCAB, base_plan, config_of
from verifying import fill

from outsize.collectives import Mesh
from outsize.errors import OutsizeError
from outsize.models.build import build, coded_draw
from outsize.models.coding import coded, format_of
from outsize.optim import AdamW
from outsize.parallel.check.decoder import Spread, check_decoder
from outsize.parallel.tensor.declared import boundaries
from outsize.parallel.tensor.units import cuts_of
from outsize.plan import Pipelined, Rest, Sharding, Stage
from outsize.plan.plan import per_segment
from outsize.techniques.adapt.dora import Dora
from outsize.techniques.adapt.ia3 import Ia3
from outsize.techniques.adapt.loha import Loha
from outsize.techniques.adapt.lokr import Lokr
from outsize.techniques.adapt.mixlora import MixLora
from outsize.techniques.adapt.oft import Oft
from outsize.techniques.adapt.parallel_adapters import Parallel
from outsize.techniques.adapt.serial_adapters import Serial
from outsize.verify import Case, Native, verify

PLANS = {
    "recompute, states below": {
        "stages": tuple(replace(s, rest=Rest("disk")) for s in per_segment(5, ("block",))),
        "microbatch_rows": 2,
    },
    "chunks, tiles": {
        "stages": (Stage(0, 1), Stage(1, 4, ("block",)), Stage(4, 5)), "sequence_chunk": 6,
        "mlp_tile": 6, "loss_chunk": 7,
    },
    "data, all cut": {"mesh": Mesh(data=2), "shards": Sharding(2, 2, 2), "stages": MIXED},
    "tensor, by tokens, overlapped": {
        "mesh": Mesh(tensor=2), "sequence_parallel": True, "overlap": 2,
    },
    "tensor, pipeline": {"mesh": Mesh(tensor=2, pipeline=2), "pipeline": Pipelined("1f1b")},
    "experts": {"mesh": Mesh(expert=2), "stages": MIXED},
}  # fmt: skip
SECOND = "recompute, states below"  # the one plan with a second step, of states that come back
# Each method on the tensor axis, and most in a plan more; each plan with methods of two kinds.
PAIRS = [
    *((name, "tensor, by tokens, overlapped") for name in METHODS),
    ("dora", "tensor, pipeline"),
    ("oft", "recompute, states below"),
    ("lokr", "data, all cut"),
    ("ia3", "chunks, tiles"),
    ("serial", "recompute, states below"),
    ("serial", "tensor, by tokens, overlapped"),
    ("parallel", "tensor, pipeline"),
    ("parallel", "chunks, tiles"),
    ("mixlora", "tensor, by tokens, overlapped"),
    ("mixlora", "data, all cut"),
    ("mixlora", "experts"),
]
OURS = {name: method.ours for name, method in METHODS.items()} | {
    "serial": Serial(3), "parallel": Parallel(3, beside=("attention", "mlp")),
    "mixlora": MixLora(4, 2, 3, 5.0, 0.5),
}  # fmt: skip


@pytest.mark.parametrize(("method", "plan"), PAIRS)
def test_a_plan_trains_as_plain_pytorch(method, plan):
    made = base_plan(**PLANS[plan])
    data = batches(2, made.rows, SEQUENCE, VOCAB)
    config = replace(config_of("gemma2"), adapter=OURS[method])
    case = Case(
        Native(config, lambda: fill), made, AdamW(1e-2, eps=1e-4), lambda step: data[step],
        1 + (plan == SECOND), 0.5,
    )  # fmt: skip
    found = verify(case, own=False)
    assert found.holds, found
    names = {row.name for row in found.exact.rows}
    own = all(".beside." in name or "_around." in name for name in names)
    assert names and own, "what is frozen has no gradient"


@pytest.mark.parametrize("method", ["dora", "oft"])
def test_weights_may_be_codes(method):
    """Lengths of rows are those of the decoded weights."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
    plain = coded(config_of("gemma2", **sizes), format_of("int4:16"))
    made = base_plan(mesh=Mesh(tensor=2), sequence_parallel=True)
    data = batches(1, made.rows, SEQUENCE, VOCAB)
    config = replace(plain, adapter=METHODS[method].ours)
    native = Native(config, lambda: coded_draw(build(config), fill))
    case = Case(native, made, AdamW(1e-2, eps=1e-4), lambda step: data[step], 1, 0.5)
    found = verify(case, own=False)
    assert found.holds, found
    model = build(replace(plain, adapter=Dora(2)), seed=1, dtype=torch.float64)
    one = model.get_submodule("blocks.1.mlp.up")
    lengths = one.matrix().norm(dim=1).double()
    torch.testing.assert_close(one.beside.magnitude.detach(), lengths, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("family", "adapter", "sequence_parallel"),
    [
        ("gpt2", Dora(3), False), ("deepseek_v3", Dora(3), True), ("gpt2", Loha(3), True),
        ("llama", Oft(2), True), ("llama", Ia3(("mlp.up", "mlp.down"), ("attention.q",)), False),
        ("gpt2", MixLora(4, rank=3), False),
    ],
)  # fmt: skip
def test_the_checker_passes_its_layouts_and_sees_wrong_ones(family, adapter, sequence_parallel):
    config = replace(config_of(family), adapter=adapter)
    size = 3 if family == "gpt2" else 2
    cuts = cuts_of(build(config), size, 0, sequence_parallel)
    own = [name for name in cuts if ".beside." in name]

    def found(cuts):
        return check_decoder(config, size, Spread(cuts, boundaries(sequence_parallel)))

    assert not found(cuts)
    whole = next(n for n in own if cuts[n].partial)
    assert found({**cuts, whole: replace(cuts[whole], partial=False)}), whole
    cut = next(n for n in own if cuts[n].dim is not None)
    lost = replace(cuts[cut], dim=None, spans=(), shared=size, partial=True)
    assert found({**cuts, cut: lost}), cut


def test_blocks_that_a_tensor_axis_would_cut_are_refused():
    model = build(replace(config_of("llama"), adapter=Lokr(2)))
    with pytest.raises(OutsizeError, match=r"k.beside.c has 3 blocks for the model's 2 key-value"):
        cuts_of(model, 2, 0, False)
