"""Runs on chats from a Hugging Face directory: the first loss is transformers' own over the
assistant's tokens, a run that died goes on bitwise, a bad line ends it before anything starts."""

from __future__ import annotations

import json
import math

import chats
import pytest
import torch
from chats import CHATS, PLAIN, foreign, jsonl, messages, template
from run_files import DeathError, assert_same_run
from torch.nn import functional as F

from outsize.cli.prompts import trained_on_chats
from outsize.errors import OutsizeError
from outsize.train import derive
from outsize.train.loop import Loop
from outsize.train.metrics import read_metrics
from outsize.train.recipe import files_of
from outsize.train.resolve import resolve

WEIGHTS = (1, 0.5, 0, 2)


def talks(home):
    """Thirty chats, some answers with weights of their own."""
    made = []
    for number in range(30):
        chat = [("system", f"chat {number}"), *CHATS[number % 3]]
        if chat[1][0] == "system":
            chat = chat[1:]
        one = messages(chat)
        one[-1]["weight"] = WEIGHTS[number % 4] or (0 if len(CHATS[number % 3]) > 2 else 1)
        made.append({"messages": one})
    return jsonl(home / "chats.jsonl", made), made


@pytest.fixture
def subject(runs):
    """Keys of a run, the model of transformers, its chats."""
    transformers = pytest.importorskip("transformers")
    directory = chats.tokenizer(runs.home / "model", template("chatml", PLAIN), as_file=True)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=24, vocab_size=300, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=256,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(directory)
    path, records = talks(runs.home)
    keys = {
        "model__name": directory, "data__path": path, "data__chat": "true", "data__validation": "0",
        "data__cache": runs.home / "cache", "precision": "float64", "train__sequence": 128,
        "train__batch_tokens": 512, "train__evaluate_every": 0, "sample__tokens": 0,
    }  # fmt: skip
    return keys, directory, model.double(), records


def loss_of(model, directory, records):
    """Every chat by itself, weights of the assistant's messages on its tokens."""
    total, weight = 0.0, 0.0
    for record in records:
        turns = [(one["role"], one["content"]) for one in record["messages"]]
        ids, mask = foreign(directory, turns, template("chatml"))
        own = [m.get("weight", 1) for m in record["messages"] if m["role"] == "assistant"]
        starts = [i for i, one in enumerate(mask) if one and not mask[i - 1]]
        assert len(starts) == len(own)
        weights = torch.zeros(len(ids), dtype=torch.float64)
        for at, one in enumerate(mask):
            if one:
                weights[at] = own[sum(start <= at for start in starts) - 1]
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0]
        losses = F.cross_entropy(logits[:-1], torch.tensor(ids[1:]), reduction="none")
        total, weight = total + float((losses * weights[1:]).sum()), weight + float(weights.sum())
    return total / weight


def test_the_first_loss_is_that_of_transformers(runs, subject):
    keys, directory, model, records = subject
    from outsize.data import SOURCES, DataConfig, TrainStream, ValidationStream, open_data
    from outsize.techniques.data.chat import KEY, Chat

    config = DataConfig(
        path=str(keys["data__path"]), tokenizer=str(directory), validation=0.0,
        cache=str(keys["data__cache"]), source=(SOURCES.get(KEY), Chat()), sequence=128,
    )  # fmt: skip
    data = open_data(config).train
    rows = TrainStream(data, 0, 1, 128).rows_per_epoch
    del keys["data__chat"]  # the records say it
    once = {"train__batch_tokens": 128 * rows, "train__steps": 1}
    printed = runs.train(**keys | once | {"data__evaluation__path": keys["data__path"]})
    assert "chats.jsonl has chats (messages), which data.chat trains on as such" in printed
    assert "nothing is held out" not in printed
    few = runs.train(**keys | {"data__validation": 0.001, "output": runs.home / "few"})
    assert "data.validation: 0.001 of 30 documents is none; 0.1 or so would, or" in few
    share = f"{data.targets / data.tokens:.1%} of them targets"
    assert f"data: 30 documents, {data.tokens:,} tokens ({share})" in printed
    (first,) = [one for one in read_metrics(runs.home / "run") if "loss" in one]
    assert first["loss"] == pytest.approx(loss_of(model, directory, records), rel=1e-10)
    (held,) = [one for one in read_metrics(runs.home / "run") if "validation_loss" in one]
    nats = held["validation_bits_per_byte"] * held["validation_bytes"] * math.log(2)
    targets = sum(float(batch.weights_BS.sum()) for batch in ValidationStream(data, 1, 128))
    assert held["validation_loss"] * targets == pytest.approx(nats, rel=1e-3)
    assert (runs.home / "run" / "step-00000001" / "chat_template.jinja").is_file()


def test_records_say_what_they_are_unless_the_user_does(tmp_path):
    """A chat's fields; not where there is a text beside them, and not where the user says no."""
    chat = {"instruction": "a", "output": "b"}
    jsonl(tmp_path / "chats.jsonl", [chat])
    jsonl(tmp_path / "texts.jsonl", [chat | {"text": "a b"}])
    (tmp_path / "text.txt").write_text("a b")

    def source(*sets):
        return derive.source(resolve(None, sets)).values.get("data.chat")

    path = f"data={tmp_path}/chats.jsonl"
    assert source(path) is True is source(f"data=[{tmp_path}/text.txt, {tmp_path}/chats.jsonl]")
    assert source(path, "data.chat=false") is False and source(path, "data.kind=text") is None
    assert source(path, "data.field=output") is None
    assert source(path, "data.chat.long=leave") is None, "it is on already"
    for other in ("texts.jsonl", "text.txt", "nowhere"):
        assert source(f"data={tmp_path}/{other}") is None
    assert source() is None


def test_a_template_by_name_or_file_goes_into_the_checkpoint(tmp_path):
    file = tmp_path / "mine.jinja"
    file.write_text("{{ messages[0].content }}")
    configs = [
        resolve(None, [f"data.chat.template={one}"]).config for one in ("own", "zephyr", file)
    ]
    said = [files_of(config).get("chat_template.jinja") for config in configs]
    assert said[0] is None and "<|assistant|>" in said[1] and said[2] == file.read_text()
    with pytest.raises(OutsizeError, match=r"neither a file nor one of .* did you mean 'zephyr'"):
        files_of(resolve(None, ["data.chat.template=zefyr"]).config)


def test_a_run_on_chats_that_died_goes_on_bitwise(runs, subject, monkeypatch):
    keys, records = dict(subject[0]), subject[3]
    one, two = (jsonl(runs.home / f"{i}.jsonl", records[i::2]) for i in (0, 1))
    keys["data__path"] = json.dumps({str(one): 2, str(two): 1})  # a mixture
    whole, cut, step = runs.home / "whole", runs.home / "cut", Loop._step
    runs.train(**keys, output=whole)

    def dying(loop, batch, show):
        if loop.place.step == 5:
            raise DeathError
        step(loop, batch, show)

    with monkeypatch.context() as patch, pytest.raises(DeathError):
        patch.setattr(Loop, "_step", dying)
        runs.train(**keys, output=cut)
    assert "going on from step 3 of 8" in runs.resume(cut)
    assert_same_run(whole, cut)


def test_memory_is_predicted_with_the_weights(runs, subject):
    """The forecast of a run that measures itself: never under."""
    printed = runs.train(**subject[0])
    (line,) = [one for one in printed.splitlines() if one.startswith("peak memory")]
    assert line.split()[-1] in ("+0.0%", "-0.0%", "-0.1%", "-0.2%"), line


def test_what_is_wrong_ends_it_before_the_machine_is_measured(runs, subject, monkeypatch):
    keys = subject[0]
    path, records = talks(runs.home)
    jsonl(path, [*records, {"messages": [{"role": "user", "content": "a"}]}])
    with pytest.raises(OutsizeError, match=r"chats\.jsonl:31: no assistant message"):
        runs.train(**keys)
    assert not (runs.home / "run").exists()

    def probe(device):
        raise AssertionError("measured")

    monkeypatch.setattr("outsize.train.setup.probe", probe)
    with pytest.raises(OutsizeError, match="data path nowhere does not exist"):
        runs.train(**keys | {"data__path": "nowhere"})


def test_the_sample_answers_the_first_question_as_the_template_writes_it(runs, subject) -> None:
    keys, directory, _, records = subject
    said = {**keys, "sample__tokens": 5, "sample__temperature": 0, "optimizer__lr": 0}
    runs.train(**said, train__steps=1)
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    asked = list(records[0]["messages"])
    while asked[-1]["role"] == "assistant":  # its first answer is the last one
        asked.pop()
    shown = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
    found = (runs.home / "run" / "sample.txt").read_text()
    assert shown in found and found.startswith(shown)
    assert trained_on_chats(runs.home / "run" / "step-00000001") and not trained_on_chats(directory)
    runs.train(**said, train__steps=1, sample__prompt="naive", output=runs.home / "text")
    assert (runs.home / "text" / "sample.txt").read_text().startswith("naive")
