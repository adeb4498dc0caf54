"""Dropout by counter: the mask against the stream it is drawn from, decoders against transformers
with the same masks, jobs against the plain run however the step is cut."""

from __future__ import annotations

from dataclasses import replace

import plain
import pytest
import streamed
import torch
import transformers
from subjects import MIXED
from threads import play

from outsize.checkpoint.hub import load
from outsize.collectives import Mesh, along
from outsize.errors import OutsizeError
from outsize.models.dropout import Noise
from outsize.models.random import bits
from outsize.optim import AdamW
from outsize.parallel.tensor.decoder import split
from outsize.plan.plan import per_segment
from outsize.runtime import Job, NativeFlow
from outsize.runtime.recipe import Here, Recipe

RATE = 0.3


def mask(noise: Noise, tokens: int, features: int, name: str) -> torch.Tensor:
    """By the definition, one element at a time; of the elements that stay."""
    words = -(-features // 4)
    limit = round(noise.rate * 65536)
    kept = torch.empty(tokens, features, dtype=torch.bool)
    for t in range(tokens):
        for d in range(features):
            at = (noise.first + t) * words + d // 4
            (word,) = bits(noise.seed, f"dropout {noise.step} {name}", at, at + 1)
            kept[t, d] = bool(int(word) >> (16 * (d % 4)) & 0xFFFF >= limit)
    return kept


@pytest.mark.parametrize("features", [1, 6, 8])
def test_what_stays_is_drawn_from_the_stream(features):
    noise, x = Noise(RATE, 5, 7, first=3), torch.randn(9, features, dtype=torch.float64)
    expected = x * mask(noise, 9, features, "a") / (1 - round(RATE * 65536) / 65536)
    assert torch.equal(noise(x, "a") == 0, expected == 0)
    assert torch.allclose(noise(x, "a"), expected, rtol=1e-15, atol=0)


def test_any_stretch_of_tokens_has_the_mask_of_the_whole():
    noise, x = Noise(RATE, 1, 2), torch.randn(40, 7)
    whole = noise(x, "n")
    parts = [noise.at(a)(x[a:b], "n") for a, b in ((0, 1), (1, 18), (18, 40))]
    assert torch.equal(torch.cat(parts), whole)
    assert torch.equal(noise.at(3).at(15)(x[18:], "n"), whole[18:])


def test_pieces_do_not_show(monkeypatch):
    noise, x = Noise(RATE, 1, 2), torch.randn(40, 7)
    whole = noise(x, "n")
    monkeypatch.setattr("outsize.models.dropout._PIECE", 21)
    assert torch.equal(noise(x, "n"), whole)


def test_gradient_has_the_same_mask_and_scale():
    x = torch.randn(12, 5, dtype=torch.float64, requires_grad=True)
    noise = Noise(0.5, 1, 2)
    y = noise(x, "n")
    y.backward(torch.full_like(y, 3.0))
    assert torch.equal(x.grad, 3.0 * 2 * (y != 0))


def test_share_and_mean():
    """Of a million elements: within five standard deviations."""
    x = torch.ones(1000, 1000, dtype=torch.float64)
    y = Noise(0.1, 0, 0)(x, "n")
    deviation = (0.1 * 0.9 / 1e6) ** 0.5
    assert abs(float((y == 0).double().mean()) - 0.1) < 5 * deviation
    assert abs(float(y.mean()) - 1) < 5 * deviation / 0.9


@pytest.mark.parametrize("change", [{"seed": 1}, {"step": 1}, {"first": 4}])
def test_masks_of_other_keys_are_independent(change):
    one = Noise(0.5, 0, 0)
    x = torch.ones(500, 400)
    for other in (replace(one, **change)(x, "n"), one(x, "m")):
        agree = float(((one(x, "n") == 0) == (other == 0)).float().mean())
        assert abs(agree - 0.5) < 5 * (0.25 / x.numel()) ** 0.5


def test_no_rate_is_no_dropout_and_all_is_refused():
    x = torch.randn(3, 4)
    assert Noise(0.0, 0, 0)(x, "n") is x
    with pytest.raises(OutsizeError, match=r"dropout is 1\.0; expected 0 or more, and less than 1"):
        Noise(1.0, 0, 0)


# -- in decoders ------------------------------------------------------------------------------


class Given(torch.nn.Module):
    """Stands where transformers has an nn.Dropout: ours, by the place's name."""

    def __init__(self, noise: Noise, name: str) -> None:
        super().__init__()
        self.noise, self.name = noise, name

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.noise(x.reshape(-1, x.shape[-1]), self.name).view(x.shape)


def test_gpt2_drops_where_transformers_does(tmp_path):
    config = transformers.GPT2Config(
        vocab_size=61, n_embd=24, n_layer=2, n_head=3, n_positions=32, attn_pdrop=0.0,
        attn_implementation="eager",
    )  # fmt: skip
    torch.manual_seed(0)
    theirs = transformers.GPT2LMHeadModel(config).double().train()
    theirs.save_pretrained(tmp_path)
    noise = Noise(RATE, 3, 4)
    theirs.transformer.drop = Given(noise, "embedding")
    for i, block in enumerate(theirs.transformer.h):
        block.attn.resid_dropout = Given(noise, f"{i}.attention")
        block.mlp.dropout = Given(noise, f"{i}.mlp")
    ours = load(tmp_path, dtype=torch.float64)
    ids = torch.randint(0, 61, (2, 16))
    ctx = ours.context(torch.arange(16).repeat(2), (0, 16, 32), noise=noise)
    got = ours.epilogue.logits(ours.hidden(ids.reshape(-1), ctx))
    expected = theirs(ids).logits.reshape(got.shape)
    assert float((got - expected).detach().abs().max()) <= 1e-10 * float(
        expected.detach().abs().max()
    )


# -- in jobs ----------------------------------------------------------------------------------

CUTS = {
    "uneven-microbatches": {"microbatch_rows": 2},
    "sequence-chunk": {"sequence_chunk": 8, "stages": per_segment(5, ("block",))},
    "everything": {"split_backward": True, "microbatch_rows": 2, "stages": MIXED},
}


def noisy(count: int):
    made = streamed.data_of(count)
    return [replace(batch, noise=Noise(RATE, 11, i)) for i, batch in enumerate(made)]


@pytest.fixture(scope="module")
def reference():
    """Two steps of the plain loop on whole batches, dropout from the context."""
    patched = pytest.MonkeyPatch()

    def loss_of(model, batch):
        where = batch.positions().reshape(-1), batch.flat_bounds()
        context = model.context(*where, noise=batch.noise)
        logits = model.epilogue.logits(model.hidden(batch.ids_BS.reshape(-1), context))
        return torch.nn.functional.cross_entropy(logits, batch.targets_BS.reshape(-1))

    patched.setattr(plain, "loss_of", loss_of)
    with patched.context():
        model = streamed.model_of("llama, untied", "float64")
        yield plain.train(model, noisy(2), [1e-2, 1e-2], clip=0.5, decay=0.1)
    patched.undo()


@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
def test_a_step_cut_in_any_way_gives_the_plain_numbers(reference, cut):
    losses, norms, model = reference
    job = streamed.job_of(streamed.plan_of("float64", **cut))
    for i, batch in enumerate(noisy(2)):
        assert abs(float(job.step(batch, 1e-2)) - losses[i]) <= 1e-10 * losses[i]
        assert abs(job.report.norm - norms[i]) <= 1e-10 * norms[i]
    expected = dict(model.named_parameters())
    for name, weight in job.weights():
        gap = float((weight.detach() - expected[name].detach()).abs().max())
        assert gap <= 1e-10, name


def test_dropout_changes_the_loss_and_evaluations_have_none():
    batch = noisy(1)[0]
    job = streamed.job_of(streamed.plan_of("float64"))
    silent = job.evaluate(replace(batch, noise=None), streamed.ROWS)
    bare = float(job.step(replace(batch, noise=None), 0.0))
    assert abs(silent[0] / silent[1] - bare) < 1e-10
    assert abs(float(job.step(batch, 0.0)) - bare) > 1e-3


def test_a_mesh_gives_the_plain_numbers():
    """Others: tests/verify/test_matrix.py."""
    mesh, sequence = Mesh(data=2, tensor=2), True
    alone = streamed.plan_of("float64")
    rows = -(-streamed.ROWS // mesh.data)  # the first worker may have more
    plan = replace(alone, mesh=mesh, sequence_parallel=sequence, microbatch_rows=rows)
    data = noisy(2)

    def run(world):
        model = streamed.model_of("llama", "float64")
        cuts = split(model, along(world, "tensor"), sequence)
        optimizer = AdamW(weight_decay=0.1)
        job = Job(NativeFlow(model, plan), plan, Recipe(optimizer, 0.5), Here(world), cuts=cuts)
        return numbers(job, plan)

    def numbers(job, plan):
        steps = [(float(job.step(b.rows(*plan.rows_at(job.place)), 1e-2)), job.report.norm)
                 for b in data]  # fmt: skip
        return steps, {name: w.clone() for name, w in job.weights()}

    expected, weights = numbers(streamed.job_of(alone, family="llama"), alone)
    for steps, mine in play(mesh, run):
        assert torch.allclose(torch.tensor(steps), torch.tensor(expected), rtol=1e-10, atol=0)
        for name, weight in mine.items():
            assert torch.allclose(weight, weights[name], rtol=1e-10, atol=1e-10), name
