"""How `outsize serve` may hold weights: `+head` behind a format, the head in 8 bits too, wherever
the weights are; bf16."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from threads import play

import outsize
from outsize.checkpoint import hub
from outsize.cli.generate import opened
from outsize.cli.main import main
from outsize.collectives import World, along, parse_mesh
from outsize.errors import OutsizeError
from outsize.kernels import native, rows
from outsize.models.build import build
from outsize.models.coding import as_stored, asked, decoded, format_of, held
from outsize.models.decoder import Decoder
from outsize.models.families import parse
from outsize.models.linear import linears
from outsize.parallel.tensor.decoder import split
from outsize.serve import probed
from outsize.serve.around import around

LLAMA = {
    "model_type": "llama", "vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 128,
    "max_position_embeddings": 128,
}  # fmt: skip
IDS = [3, 1, 4, 1, 5, 9, 2, 6]


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    hub.save(build(parse(LLAMA), seed=2), directory)
    return directory


def rounded(directory: Path, format: str, head: str) -> Decoder:
    """The plain model with weights that codes of them stand for, its head's apart."""
    model = hub.load(directory)
    model.epilogue.head.weight = torch.nn.Parameter(model.epilogue.head.weight.detach().clone())
    named = [*linears(model), ("epilogue.head", model.epilogue.head)]
    for name, one in named:
        form = format_of(head if name == "epilogue.head" else format)
        with torch.no_grad():
            one.weight.copy_(decoded(form, *form.encode(one.weight)))
    return model


@pytest.mark.parametrize("tied", [False, True])
def test_logits_are_those_of_the_rounded_weights(stored: Path, tied: bool, tmp_path: Path) -> None:
    """A head that is the token embedding has codes of its own, and rows of that stay as they are;
    files may have a second copy."""
    if tied:
        stored = tmp_path / "tied"
        hub.save(build(parse({**LLAMA, "tie_word_embeddings": True}), seed=2), stored)
        plain = load_file(stored / "model.safetensors")
        plain["lm_head.weight"] = plain["model.embed_tokens.weight"].clone()
        save_file(plain, stored / "model.safetensors")
        (stored / "outsize.json").unlink()
    model = outsize.load(stored, weights="int4:16+head", dtype=torch.float64)
    with torch.no_grad():
        found = model(torch.tensor([IDS]))
        expected = rounded(stored, "int4:16", "int8:64").double()(torch.tensor([IDS]))
    assert model.epilogue.head.coded is not None and model.config.coding.name == "int4:16+head"
    assert float((found - expected).abs().max()) < 1e-10


def logprobs(stored: Path, format: str, **where: object) -> list[float]:
    with outsize.engine(stored, weights=format, context=32, **where) as engine:
        return list(engine.logprobs(IDS))


def test_bits_of_a_tied_head_do_not_depend_on_where_it_lies(tmp_path: Path) -> None:
    hub.save(build(parse({**LLAMA, "tie_word_embeddings": True}), seed=2), tmp_path)
    plain = logprobs(tmp_path, "int4:32+head")
    assert plain == logprobs(tmp_path, "int4:32+head", memory="4500KiB")
    assert plain != logprobs(tmp_path, "int4:32")


def test_bits_do_not_depend_on_where_it_lies(stored: Path) -> None:
    plain = logprobs(stored, "q8_0+head")
    assert plain == logprobs(stored, "q8_0+head", memory="4500KiB")
    assert plain != logprobs(stored, "q8_0")


def test_rounded_rows_are_said_served_alike_and_near(stored: Path) -> None:
    name = "int8:32+head+a8"
    with outsize.engine(stored, weights=name, context=32) as engine:
        found, notes = list(engine.logprobs(IDS)), " ".join(engine.plan.notes)
    assert f"as {name}, and" in notes and "is rounded to 8 bits, each group" in notes
    exact = logprobs(stored, "int8:32+head")
    assert found != exact and torch.tensor(found).allclose(torch.tensor(exact), rtol=0, atol=0.05)
    model = outsize.load(stored, weights=name)
    with torch.no_grad():
        logits = model(torch.tensor([IDS]))[0].log_softmax(-1)
    plain = logits[:-1].gather(-1, torch.tensor(IDS[1:])[:, None])[:, 0]
    assert torch.tensor(found).allclose(plain, rtol=0, atol=1e-5)


@pytest.mark.skipif(native.library() is None, reason="no C++ compiler")
def test_what_serving_does_not_use_is_not_compiled(
    stored: Path, kernels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of rounded rows no products of others, of pages as stored no other form of them."""
    compiler = next(filter(None, map(shutil.which, native._COMPILERS)))
    base = {"passes", "eights", "blocks-float32", "pages-float32"}
    for weights, cache, more in (
        ("int8:32+head+a8", "as-stored", set[str]()),
        ("int8:32+a8", "int8", {"rows-float32", "coded-float32"}),
    ):
        fresh = native.load(compiler, kernels)
        assert fresh is not None
        monkeypatch.setattr(native, "library", lambda fresh=fresh: fresh)
        around.cache_clear()  # as a first start has it
        monkeypatch.setattr(probed, "kept", lambda kind, key, make, holds: make())
        with outsize.engine(stored, weights=weights, cache=cache, context=32) as engine:
            before = set(fresh.libraries._open)
            assert engine.generate([IDS], max_tokens=3) and list(engine.logprobs(IDS))
        assert before == set(fresh.libraries._open) == base | more


def test_outliers_are_said_and_are_a_tokens_own(stored: Path) -> None:
    """Of a model that has such: a norm that makes one feature of some tokens 20 times as large."""
    model = hub.load(stored)
    with torch.no_grad():
        for block in model.blocks:
            block.attention_norm.weight[5] = 20.0
    directory = stored.parent / "outliers"
    hub.save(model, directory)
    name, errors = "int8-rows+outliers", {}
    exact = torch.tensor(logprobs(directory, "int8-rows"))
    for one in (name, "int8-rows+a8"):
        with outsize.engine(directory, weights=one, context=32) as engine:
            found, notes = list(engine.logprobs(IDS)), " ".join(engine.plan.notes)
            beside = [list(engine.logprobs(IDS[:last])) for last in (3, 6)]
        assert beside == [found[:2], found[:5]]
        assert "each token with a scale of its own" in notes
        assert ("of magnitude 6 or more stay as they are" in notes) == (one == name)
        errors[one] = float((torch.tensor(found) - exact).abs().mean())
    assert errors[name] < errors["int8-rows+a8"] / 2


@pytest.mark.parametrize("how", ["+a8", "+outliers"])
@pytest.mark.parametrize(
    ("dtype", "limit"), [(torch.float64, 1e-10), (torch.float32, 3e-4)], ids=["plain", "passes"]
)
def test_workers_round_a_token_with_one_scale(
    stored: Path, how: str, dtype: torch.dtype, limit: float
) -> None:
    """Of parts of rows too, one of them with the whole row's largest number: the numbers of one
    worker, for a number a token and cut product beside the sums. In float32 a number next to the
    middle of two steps may go to the other."""
    weights, ids = f"int8-rows:16{how}", torch.tensor([IDS])
    with torch.no_grad():
        expected = outsize.load(stored, weights=weights, dtype=dtype)(ids)

    def work(world: World) -> tuple[torch.Tensor, int, int]:
        model, axis = outsize.load(stored, weights=weights, dtype=dtype), along(world, "tensor")
        split(model, axis)
        with torch.no_grad(), rows.alone():
            logits = model(ids)
        plain = outsize.load(stored, weights=weights.removesuffix(how), dtype=dtype)
        had = axis.received["all_reduce"]
        split(plain, axis)
        with torch.no_grad():
            plain(ids)
        return logits, had, axis.received["all_reduce"] - had

    wide = torch.promote_types(dtype, torch.float32).itemsize
    for logits, had, plainly in play(parse_mesh("tensor=2"), work):
        assert float((logits - expected).abs().max()) < limit
        assert had - plainly == len(IDS) * wide * 2 * LLAMA["num_hidden_layers"]


def test_what_it_cannot_be_is_refused(stored: Path, tmp_path: Path) -> None:
    config = parse(LLAMA)
    with pytest.raises(
        OutsizeError, match="groups of 16 weights, which do not divide the head's 24"
    ):
        asked(replace(config, hidden=24), "int8+head")
    with pytest.raises(
        OutsizeError,
        match="codes of nf4 are none; expected one of int4, int8, int8-rows, q4_0, q8_0;",
    ):
        asked(config, "nf4+a8")
    with pytest.raises(
        OutsizeError, match="expected a format, \\+head and \\+a8 or \\+outliers behind"
    ):
        asked(config, "int4+a16")
    with pytest.raises(OutsizeError, match="\\+head and \\+a8 or \\+outliers behind it"):
        asked(config, "int4+a8+outliers")
    with pytest.raises(OutsizeError, match="blocks' codes alone: leave \\+a8 out"):
        as_stored(asked(config, "int4:16+a8"))
    files = as_stored(asked(config, "int4:16"))
    found = asked(files, "int4:16+a8").coding
    assert found is not None and found.stored and found.eights
    assert asked(files, "int4:16") is files
    ran = CliRunner().invoke(
        main, ["convert", str(stored), "--weights", "int4:16+head", "--into", str(tmp_path / "x")]
    )
    assert ran.exit_code == 2 and "leave +head out" in ran.output, ran.output


def test_what_is_rounded_is_said(stored: Path) -> None:
    said = []
    for how in ({"weights": "int8:32+head"}, {"dtype": torch.bfloat16}, {}):
        with outsize.engine(stored, context=32, **how) as engine:
            said.append([note for note in engine.plan.notes if "weights are held" in note])
    assert "as int8:32+head, and are rounded" in said[0][0]
    assert "in torch.bfloat16, and are rounded" in said[1][0] and not said[2]


def test_names_that_are_no_formats(stored: Path) -> None:
    config = parse(LLAMA)
    assert held(config, "as-stored", "") == held(config, None, "") == (config, None)
    found, dtype = held(config, "bf16", "")
    home = opened(stored, found, None, torch.device("cpu"), (), dtype)
    assert home.prologue.tokens.weight.dtype is torch.bfloat16
