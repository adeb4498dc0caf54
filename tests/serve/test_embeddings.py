"""Embeddings: what the head would multiply, beside transformers."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import openai
import pytest
import tokenizers
import torch
import transformers as hf
from float64 import Float64
from serving import KEY, ROOM, asked, served

import outsize
from outsize.data.tokenizer import open_tokenizer
from outsize.decode.samplers import Sampling
from outsize.errors import OutsizeError
from outsize.serve.asks import Ask, Full
from outsize.serve.engine import Engine
from outsize.serve.model import Model
from outsize.serve.policies import POLICIES
from outsize.serve.pooling import FIRST, LAST, MEAN, PLAIN, Pooling, pooling_in

TEXTS = ["of many words, more than one slice has", "a"]


@pytest.fixture(scope="module")
def plain() -> hf.LlamaModel:
    torch.manual_seed(1)
    config = hf.LlamaConfig(
        vocab_size=257, hidden_size=24, intermediate_size=36, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, initializer_range=0.3,
    )  # fmt: skip
    with Float64():  # the frequencies of its positions too
        return hf.LlamaModel(config).double().eval()


@pytest.fixture(scope="module")
def model(plain: hf.LlamaModel, tmp_path_factory: pytest.TempPathFactory) -> Model:
    whole = hf.LlamaForCausalLM(plain.config).double()
    whole.model = plain
    folder = tmp_path_factory.mktemp("model")
    whole.save_pretrained(folder)
    found = outsize.load(folder)
    assert isinstance(found, Model)
    return found


@pytest.fixture(scope="module")
def engine(model: Model) -> Iterator[Engine]:
    with Engine(model, replace(ROOM, budget=8), POLICIES.get("mixed")) as found:
        yield found


@torch.no_grad()
def states(plain: hf.LlamaModel, ids: list[int]) -> torch.Tensor:
    with Float64():
        found: torch.Tensor = plain(torch.tensor([ids])).last_hidden_state[0]
    return found


def expected(plain: hf.LlamaModel, ids: list[int], mode: str) -> torch.Tensor:
    states_TE = states(plain, ids)
    return {LAST: states_TE[-1], FIRST: states_TE[0], MEAN: states_TE.mean(0)}[mode]


@pytest.mark.parametrize("mode", [LAST, MEAN, FIRST])
def test_vectors_are_those_of_transformers(engine: Engine, plain: hf.LlamaModel, mode: str) -> None:
    for text in TEXTS:
        ids, found = list(text.encode()), list[torch.Tensor]()
        engine.look(ids, True, found.append)
        wanted_E = expected(plain, ids, mode)
        found_E = Pooling(mode, False).vector(engine, ids)
        torch.testing.assert_close(found_E.double(), wanted_E, rtol=1e-6, atol=1e-6)
        wanted_E = torch.nn.functional.normalize(wanted_E, dim=0)
        found_E = Pooling(mode, True).vector(engine, ids)
        torch.testing.assert_close(found_E.double(), wanted_E, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(torch.cat(found), states(plain, ids), rtol=1e-10, atol=1e-10)
    few_E = Pooling(mode, False).vector(engine, ids, 5)
    wanted_E = torch.nn.functional.normalize(wanted_E[:5], dim=0)
    torch.testing.assert_close(few_E.double(), wanted_E, rtol=1e-6, atol=1e-6)


def test_openais_client_embeds(model: Model, plain: hf.LlamaModel) -> None:
    with served(Engine(model, ROOM, POLICIES.get("mixed")), "on") as (host, port):
        client = openai.OpenAI(base_url=f"http://{host}:{port}/v1", api_key=KEY, max_retries=0)
        # The client asks for base64 where nothing is said, and reads it.
        packed = client.embeddings.create(model="small", input=TEXTS)
        listed = client.embeddings.create(model="small", input=TEXTS, encoding_format="float")
        assert packed.data == listed.data and packed.usage.total_tokens == sum(map(len, TEXTS))
        ids = [list(text.encode()) for text in TEXTS]
        assert client.embeddings.create(model="small", input=ids).data == packed.data
        for text, one in zip(TEXTS, packed.data, strict=True):
            wanted_E = expected(plain, list(text.encode()), LAST)
            wanted_E = torch.nn.functional.normalize(wanted_E, dim=0).float()
            torch.testing.assert_close(torch.tensor(one.embedding), wanted_E)
        few = client.embeddings.create(model="small", input="a", dimensions=5).data[0].embedding
        start_E = torch.tensor(packed.data[1].embedding)[:5]
        torch.testing.assert_close(torch.tensor(few), torch.nn.functional.normalize(start_E, dim=0))
        for body, words in (
            ({"input": "a", "dimensions": 25}, "this model has 24"),
            ({"input": []}, "input"),
            ({"input": "a" * 300}, "has room for 256"),
            ({"input": [300]}, "expected 0 to 256"),
            ({"input": "a", "stream": True}, "stream"),
        ):
            status, answer, _ = asked((host, port), "/v1/embeddings", body)
            assert status == 400 and words in answer["error"]["message"]


def test_a_directory_says_how(tmp_path: Path) -> None:
    assert pooling_in(tmp_path) == PLAIN
    base = "sentence_transformers.models."

    def says(kinds: list[str], pooling: dict[str, bool]) -> Pooling:
        modules = [{"type": base + kind, "path": kind} for kind in kinds]
        (tmp_path / "modules.json").write_text(json.dumps(modules), encoding="utf-8")
        (tmp_path / "Pooling").mkdir(exist_ok=True)
        (tmp_path / "Pooling" / "config.json").write_text(json.dumps(pooling), encoding="utf-8")
        return pooling_in(tmp_path)

    mean = {"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}
    assert says(["Transformer", "Pooling"], mean) == Pooling(MEAN, False)
    last = {"pooling_mode_lasttoken": True}
    assert says(["Transformer", "Pooling", "Normalize"], last) == Pooling(LAST, True)
    with pytest.raises(OutsizeError, match="Dense is not known"):
        says(["Transformer", "Pooling", "Dense"], last)
    with pytest.raises(OutsizeError, match="pooling_mode_max_tokens is not known"):
        says(["Pooling"], {"pooling_mode_max_tokens": True})


def test_texts_get_what_the_tokenizer_puts_around_them(tmp_path: Path) -> None:
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "<s>": 1, "</s>": 2}, "a"))
    inner.add_special_tokens(["<s>", "</s>"])
    inner.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    inner.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "</s>"}', encoding="utf-8")
    assert open_tokenizer(str(tmp_path)).framed("a") == [1, 0, 2]
    assert open_tokenizer("bytes").framed("a") == [97]


def test_states_that_are_no_numbers_are_refused(model: Model) -> None:
    broken = copy.deepcopy(model)
    with torch.no_grad(), Engine(broken, ROOM, POLICIES.get("mixed")) as engine:
        broken.epilogue.norm.weight.fill_(float("nan"))
        with pytest.raises(OutsizeError, match="states for this text that are not finite"):
            Pooling().vector(engine, [1, 2])
        assert engine.fault is None


def test_embeddings_wait_in_the_same_queue(model: Model) -> None:
    """An engine that nobody starts."""
    engine = Engine(model, ROOM, POLICIES.get("mixed"))
    for _ in range(3):
        engine.submit(Ask((1,) * 250, 1, Sampling()), lambda one: None)
    with pytest.raises(Full, match="750 tokens wait in the queue, which holds 900"):
        engine.look([1] * 200, True, lambda h_TE: None)
    engine.start()
    engine.close()
