"""`outsize plan MODEL --serve --hardware SPEC`: devices that are not here, divided into copies."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from outsize.cli.main import main
from outsize.foresight.named import shape_of
from outsize.hardware import parse_spec
from outsize.models.coding import format_of
from outsize.serve.described import STREAMED, Served
from outsize.serve.published import LATER

SPEC = "4 x H100-SXM"
QUICK = ("--policy", "mixed", "--step", "512")
CONFIG = {
    "model_type": "llama", "vocab_size": 512, "hidden_size": 256, "num_hidden_layers": 3,
    "intermediate_size": 512, "num_attention_heads": 8, "num_key_value_heads": 2,
    "tie_word_embeddings": False,
}  # fmt: skip


def said(*words: str) -> Any:
    return CliRunner().invoke(main, ["plan", *words])


def made(*words: str) -> dict[str, Any]:
    found = said(*words, "--json")
    assert found.exit_code == 0, found.output
    told: dict[str, Any] = json.loads(found.output)
    return told


@pytest.fixture
def directory(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return str(tmp_path)


def test_bytes_by_hand_and_a_lone_request_by_the_price_of_its_steps(directory: str) -> None:
    """256 tokens of a prompt are one step; heads of 32, of keys 2, in 2 bytes."""
    words = ("--rate", "0.01", "--prompt", "256", "--output", "9", "--memory", "1GiB")
    nodes = "2 x 2 H100-SXM @ 25GB/s"
    found = made(directory, "--serve", "--hardware", nodes, *QUICK, *words)
    assert {(one["copies"], one["tensor"]) for one in found["divisions"]} == {(4, 1), (2, 2)}
    block = 256 * (256 + 2 * 64 + 256) + 3 * 256 * 512 + 2 * 256
    whole = 2 * (3 * block + 256 + 2 * 512 * 256)
    for one in found["divisions"]:
        tensor = one["tensor"]
        assert one["bytes"]["weights"] == pytest.approx(whole / tensor, rel=2e-3)
        token = 2 * 2 * 3 * max(1, 2 / tensor) * 32
        pages = ((1 << 30) - one["bytes"]["weights"]) / (token * 16)
        assert one["cached_tokens"] == pytest.approx(16 * pages, abs=17)
        served = Served(shape_of(directory), parse_spec(nodes).groups[0], tensor, "bf16", *LATER)
        price = served.price()
        assert one["way"]["outcome"]["ttft"][0] == pytest.approx(price.step(256, 1, 0), rel=0.02)
        assert price.step(1, 1, 0) <= one["way"]["outcome"]["tpot"][0] < 1.1 * price.step(1, 1, 0)


def test_codes_are_read_as_such_and_multiplied_in_bf16(directory: str) -> None:
    """Of weights in int4, 4.5 bits each, one token takes as much less of the memory's time; many
    take the operations of bf16. Head and token embedding stay in 16 bits."""
    group, shape = parse_spec(SPEC).groups[0], shape_of("llama3-8b")
    plain = Served(shape, group, 1, "bf16", 0.0)
    coded = replace(plain, codes=format_of("int4:32"))
    ends = 2 * 128256 * 4096 + 32 * 2 * 4096
    inner = shape.parameters - ends
    assert coded.weights == pytest.approx(inner * 4.5 / 8 + 2 * ends, rel=1e-6)
    saved = (inner - 4096) * (2 - 4.5 / 8) / (group.device.bandwidth.value * STREAMED)
    token = plain.price().step(1, 1, 0) - coded.price().step(1, 1, 0)
    assert token == pytest.approx(saved, rel=1e-2)
    assert coded.price().step(4096, 1, 0) == plain.price().step(4096, 1, 0)
    words = ("--serve", "--hardware", SPEC, *QUICK, "--memory", "1GiB", "--weights", "int4:32")
    (one, *_) = made(directory, *words)["divisions"]
    block = 256 * (256 + 2 * 64 + 256) + 3 * 256 * 512
    whole = 3 * block * 4.5 / 8 + 2 * (3 * 2 * 256 + 256 + 2 * 512 * 256)
    assert one["bytes"]["weights"] == pytest.approx(whole / one["tensor"], rel=2e-3)
    refused = said(directory, *words[:-1], "int4:256", "--mesh", "tensor=4")
    assert refused.exit_code == 2 and "do not divide the 64 inputs" in refused.output


def test_the_first_is_the_best_and_the_others_lose_by_something() -> None:
    words = ("llama3-8b", "--serve", "--hardware", SPEC, *QUICK, "--rate", "4")
    late = [one["way"]["outcome"] for one in made(*words)["divisions"]]
    worth = [one["ttft"][1] * one["tpot"][1] for one in late]
    assert worth == sorted(worth) and len(worth) == 3
    shown = said(*words, "--top", "2").output
    assert shown.count("behind it: ") == 1 and "not " in shown and "requests a second" in shown


def test_an_slo_is_kept_up_to_a_rate_by_each_copy() -> None:
    words = ("llama3-8b", "--serve", *QUICK, "--mesh", "tensor=1", "--slo", "tpot=14ms")
    words = (*words, "--prompt", "512", "--output", "48")
    one, two = (made(*words, "--hardware", f"{n} x H100-SXM") for n in (1, 2))
    assert 10 < one["most_requests_per_second"] < 100
    twice = 2 * one["most_requests_per_second"]
    assert two["most_requests_per_second"] == pytest.approx(twice, rel=0.2)


def test_a_division_that_does_not_fit_is_left_out_with_its_bytes() -> None:
    found = made("llama3-70b", "--serve", "--hardware", SPEC, *QUICK, "--rate", "0.1")
    assert {one["tensor"] for one in found["divisions"]} == {2, 4}
    (why,) = found["left_out"]
    assert "1 device for each copy: weights of 131.42 GiB leave no room" in why


REFUSED = {
    "too large": (("llama3-70b", "RTX-4090"), "nothing is left to serve with: 1 device"),
    "no division": (("llama3-8b", SPEC, "--mesh", "tensor=3"), "a node has 4 devices"),
    "another axis": (("llama3-8b", SPEC, "--mesh", "data=2"), "on a tensor axis alone"),
    "a format": (("llama3-8b", SPEC, "--weights", "int3"), "format of weights 'int3'"),
    "inputs in codes": (("llama3-8b", SPEC, "--weights", "int4+a8"), "+a8 is not priced there"),
    "no rate": (("llama3-8b", SPEC, "--rate", "0"), "expected more than 0 requests"),
    "unlike": (("llama3-8b", "H100-SXM + A100-SXM-80"), "like devices alone"),
    "here": (("llama3-8b", "4 x this"), "leave it out"),
    "of training": (("llama3-8b", SPEC, "--explain"), "--explain is given beside --serve"),
    "of this machine": (("llama3-8b", SPEC, "--disk", "."), "--disk is given beside --hardware"),
    "too long": (("llama3-8b", SPEC, *QUICK, "--prompt", "9000000"), "a request has room for"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_said_is_refused_in_a_line(name: str) -> None:
    (model, spec, *words), expected = REFUSED[name]
    found = said(model, "--serve", "--hardware", spec, *words)
    assert found.exit_code == 2 and expected in found.output
    assert len(found.output.strip().splitlines()) == 1
