"""Parameters and optimizer states that are not here between two steps of a prepared job: who reads
or writes them is told so, where it would be other values."""

from __future__ import annotations

import copy
from collections import defaultdict
from contextlib import nullcontext

import pytest
import torch
from network_workers import batches, count, loss, network
from threads import play
from torch import nn
from torch.optim.swa_utils import AveragedModel

import outsize
from outsize import OutsizeError
from outsize.checkpoint.store import Store
from outsize.collectives import parse_mesh

READ = r"parameter 'first\.weight' has no values here between two steps.*job\.load_state_dict"
STATE = r"optimizer\.state has no values between two steps.*job\.state_dict\(\)"
MESHES = {"data=2": {"zero": 3}, "pipeline=2": {"microbatches": 2}}


@pytest.mark.parametrize("mesh", MESHES)
def test_what_is_not_here_is_neither_read_nor_written(near, mesh, tmp_path) -> None:
    given = list(batches())

    def work(world):
        model = network(seed=0)
        have = torch.optim.AdamW(model.parameters(), 1e-2, eps=1e-4)
        average = AveragedModel(model)
        job = outsize.prepare(model, have, loss=loss, count=count, mesh=mesh, **MESHES[mesh])
        mine = slice(4 * world.rank, 4 * world.rank + 4) if mesh == "data=2" else slice(8)
        job.step(tuple(part[mine] for part in given[0]))
        there = dict(model.named_parameters()) if mesh == "data=2" or world.rank else {}
        for reads in (
            lambda p: average.update_parameters(model),
            lambda p: copy.deepcopy(model),
            lambda p: p.norm(),
            lambda p: p.data.clamp_(0, 1),
            lambda p: setattr(p, "data", torch.zeros(12, 5)),
            lambda p: torch.stack([p, p]),
        ):
            if there:
                with pytest.raises(OutsizeError, match=READ):
                    reads(there["first.weight"])
        have.zero_grad()
        assert sum(p.numel() for p in model.parameters()) == 651
        for edits in (
            lambda: [one["exp_avg"].zero_() for one in have.state.values()],
            lambda: have.state[model.last.bias],
            lambda: len(have.state),
        ):
            with pytest.raises(OutsizeError, match=STATE):
                edits()
        states = have.state_dict()["state"]
        assert sorted(states) == [*range(16)] and float(states[0]["step"]) == 1
        job.save(tmp_path)
        with nullcontext() if world.rank else Store(tmp_path):  # as a neighbour's that loads too
            job.load(tmp_path)
        found = float(job.step(tuple(part[mine] for part in given[1])))
        with pytest.raises(OutsizeError, match=STATE):
            have.state.clear()
        kept = {name: weight.clone() for name, weight in job.weights()}
        unshown, have.state = have.state, defaultdict(dict)
        with pytest.raises(OutsizeError, match=r"optimizer\.state has been changed"):
            job.state_dict()
        have.state = unshown
        job.close()
        assert {type(p) for p in model.parameters()} == {nn.Parameter}
        with pytest.raises(OutsizeError, match=STATE):
            have.state_dict()  # it would be empty
        return found, kept

    twin = network(seed=0)
    want = torch.optim.AdamW(twin.parameters(), 1e-2, eps=1e-4)
    for batch in given[:2]:
        want.zero_grad()
        last = loss(twin(batch[0]), batch) / count(batch)
        last.backward()
        want.step()
    for found, kept in play(parse_mesh(mesh), near(work)):
        assert found == pytest.approx(float(last.detach()), rel=1e-10)
        for name, parameter in twin.named_parameters():
            torch.testing.assert_close(kept[name], parameter.detach(), rtol=1e-10, atol=1e-10)
