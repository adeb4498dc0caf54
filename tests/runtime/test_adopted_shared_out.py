"""Adopted modules with some blocks on each of several workers: losses and gradients of plain
autograd, whatever crosses between them."""

from __future__ import annotations

import pytest
import torch
from between import (
    WIDTH,
    Block,
    Chain,
    EncoderDecoder,
    InPlace,
    Pairs,
    Skips,
    cross_entropy,
    made,
    tokens,
)
from shared_out import Workers, check, plan_of
from torch import nn

from outsize.errors import OutsizeError
from outsize.models.adopt import find_blocks
from outsize.plan import Stage
from outsize.runtime.adopted.flow import reach_of

THIRDS, LOOPED, VEE = [0, 0, 0, 1, 1, 2, 2], [0, 0, 1, 2, 0, 1, 2], [0, 0, 1, 2, 2, 1, 0]


TIED, AGAIN = (Chain, 5, True), ("block",)


@pytest.mark.parametrize(
    ("model", "owners", "recompute"),
    [
        (TIED, LOOPED, ()), (TIED, VEE, AGAIN), ((Pairs,), LOOPED, AGAIN),
        ((EncoderDecoder,), THIRDS, AGAIN),
    ],
    ids=str,
)  # fmt: skip
def test_shared_out(model, owners, recompute):
    check(made(*model), tokens(), cross_entropy, owners, recompute=recompute)


@pytest.mark.parametrize(
    ("owners", "sent"),
    [
        ([0, 0, 0, 1, 1, 1, 1, 1], [2]),
        ([0, 0, 1, 2, 3, 2, 1, 0], [1, 2, 3, 3, 2, 2]),
        ([0, 0, 1, 0, 1, 0, 1, 1], [1, 2, 3, 3, 2]),
    ],
)
def test_skip_connections_are_carried(owners, sent):
    """No more crosses than something behind reads: counts of tensors at every boundary."""
    workers = check(made(Skips), tokens(), cross_entropy, owners)
    assert workers.sent[::2] == sent


def test_what_code_changes_in_place_is_sent_as_it_was():
    check(made(InPlace), tokens(), cross_entropy, [0, 0, 1, 2, 0, 1, 2, 2])


def test_stages_of_several_blocks():
    stages = (Stage(0, 2), Stage(2, 5, ("block",)), Stage(5, 8))
    workers = check(made(Skips), tokens(), cross_entropy, [0, 1, 0], stages=stages)
    assert workers.sent == [1, 1, 3, 3]


READ = {
    Chain: ["", "places tokens", "", "", "", "", "head norm"],
    Skips: ["", "places tokens", "", "", "across", "across", "across", "head norm"],
    EncoderDecoder: ["", "tokens", "", "between tokens", "between", "between", "head"],
    Pairs: ["", "places tokens", "scale", "scale", "scale", "scale", "head norm scale"],
}


@pytest.mark.parametrize("kind", READ)
def test_parameters_outside_the_blocks_are_found_where_they_are_read(kind):
    model = made(kind)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    drawn = torch.get_rng_state()
    reach = reach_of(model, find_blocks(model), cross_entropy, tokens()[0])
    found = [
        " ".join(sorted({name.split(".")[0] for name in reach.parameters(i)}))
        for i in range(len(reach.inputs))
    ]
    assert found == READ[kind]
    assert torch.equal(torch.get_rng_state(), drawn)  # nothing of the module is touched
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert "forward" not in model.get_submodule(find_blocks(model)[0][0]).__dict__


def test_what_one_worker_holds():
    """The first one has no head, the last one no embedding, unless they are one."""
    first = {"tokens", "places"}
    for tied, expected in ((False, [first, {"norm", "head"}]), (True, [first, first | {"norm"}])):
        model = made(Chain, 5, tied)
        workers = Workers(model, plan_of(model), cross_entropy, [0, 0, 0, 0, 1, 1, 1], tokens()[0])
        for flow, segments, names in zip(
            workers.flows, (range(4), range(4, 7)), expected, strict=True
        ):
            near = {u for i in segments for u in flow.uses[i]}
            held = {n.split(".")[0] for i in near for n, _ in flow.segments[i][1]}
            assert held - {"blocks"} == names


@torch.no_grad()
def test_evaluation_hands_on_the_same():
    """A walk without gradients, twice over one module, in the mode of evaluation."""
    model = made(Skips).eval()
    workers = Workers(model, plan_of(model), cross_entropy, [0, 0, 0, 0, 1, 1, 1, 1], tokens()[0])
    for ids in tokens():
        walks = workers.begin(ids)
        for stage in range(8):
            workers.forward(walks, stage)
        assert float(walks[1].loss) == pytest.approx(float(cross_entropy(model(ids), ids)))
        assert walks[0].loss is None
    assert workers.sent == [3, 3]


# -- refused ---------------------------------------------------------------------------------------


class Odd(Chain):
    """Does something between its blocks that needs what other workers have."""

    def __init__(self, what):
        super().__init__(2)
        self.what = what

    def forward(self, ids):
        x, mask = self.prologue(ids)
        kept = torch.zeros_like(x)
        for i, block in enumerate(self.blocks):
            if i and self.what == "value" and float(x.sum()) > 0:
                x = x * 2
            elif i and self.what == "in place":
                kept += x
            elif self.what == "draw":
                mask = torch.rand(mask.shape) > 0.5 if not i else mask
            elif i and self.what == "list":
                x = x * len(x.tolist())
            x = block(x, mask)
        if self.what == "again":
            x = self.blocks[0](x, mask)
        return self.head(self.norm(x + 0 * kept))


class Chosen(Block):
    """Experts for the tokens that a router chooses: code that runs by values."""

    def __init__(self, fixed=None):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.router, self.fixed = nn.Linear(WIDTH, 3), fixed

    def forward(self, x, mask):
        chosen = self.router(x).argmax(-1)
        out = super().forward(x, mask)
        for i in chosen.unique().tolist():
            rows = (chosen == i).nonzero(as_tuple=True)
            out[rows] = out[rows] + self.experts[i](x[rows]) * self.router.weight[i].sum()
        return out if self.fixed is None else out.view(self.fixed)


REFUSED = {
    "value": r"code around the blocks, or the loss, asks for values .*output of 'blocks.0'.* data",
    "in place": r"changes a tensor in place .*output of 'blocks.0'.*compute a new tensor",
    "draw": r"random numbers drawn before 'blocks.0' are used by blocks.0 and by blocks.1, on diff",
    "list": r"asks for values \(tolist\) of the output of 'blocks.0'",
    "again": r"block 'blocks.0' is called again",
}


def shared(model):
    plan = plan_of(model)
    owners = [0, 0, 1, 1]
    workers = Workers(model, plan, cross_entropy, owners, tokens()[0])
    return workers, workers.begin(tokens()[0])


@pytest.mark.parametrize("what", REFUSED)
def test_what_needs_values_of_others_is_refused(what):
    with pytest.raises(OutsizeError, match=REFUSED[what]) as refused:
        shared(made(Odd, what))
    assert "\n" not in str(refused.value)


def test_blocks_that_run_by_values():
    """Elsewhere they run once on zeros, which tells the form of what they give."""
    model = made(Chain)
    model.blocks = nn.ModuleList(Chosen().double() for _ in range(5))
    check(model, tokens(), cross_entropy, THIRDS)


def test_a_block_that_cannot_run_elsewhere_is_refused():
    model = made(Chain, 2)
    model.blocks[0] = Chosen(fixed=(1, 2, 3)).double()
    with pytest.raises(OutsizeError, match=r"block 'blocks.0' cannot run on shapes or zeros alone"):
        shared(model)


def test_a_later_batch_that_reads_more_is_refused():
    """What did not cross in the first batch is not there: no number is made up."""

    class Later(Chain):
        more = False

        def forward(self, ids):
            x, mask = self.prologue(ids)
            start = x
            for i, block in enumerate(self.blocks):
                x = block(x + start if i and self.more else x, mask)
            return self.head(self.norm(x))

    workers, _ = shared(made(Later, 2))
    for flow in workers.flows:
        flow.model.more = True
    walks = workers.begin(tokens()[0])
    for stage in range(2):
        workers.forward(walks, stage)
    with pytest.raises(OutsizeError, match=r"'blocks.1' reads the .*parameter 'places.weight'"):
        workers.forward(walks, 2)


def test_what_a_block_may_write_into_is_refused():

    class Noting(Chain):
        def forward(self, ids):
            x, mask = self.prologue(ids)
            for block in self.blocks:
                x = block(x, mask, None, notes=[set()])
            return self.head(self.norm(x))

    class Noted(Block):
        def forward(self, x, mask, extra, notes):
            return super().forward(x, mask, extra)

    model = made(Noting, 2)
    model.blocks = nn.ModuleList(Noted().double() for _ in range(2))
    with pytest.raises(OutsizeError, match=r"'blocks.0' receives a set, which may change .*cache"):
        shared(model)
