"""`outsize eval`, `merge`, `chat`, `generate --prompts`, against plain loops and transformers."""

from __future__ import annotations

import json
import math
from pathlib import Path

import chats
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

import outsize
from outsize.cli.command import adapters_of
from outsize.models.build import build
from outsize.models.families import parse
from outsize.serve.model import Model

SIZES = {
    "model_type": "llama", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "intermediate_size": 48, "vocab_size": 304,
    "max_position_embeddings": 128, "initializer_range": 0.4, "bos_token_id": 0, "eos_token_id": 2,
}  # fmt: skip
WORDS = (
    "the cat?",
    "naïve",
    "two",
    "日本",
    "be brief",
    "on the mat",
    "€5",
    "spaces",
    "main",
    "a b",
)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """A model with a tokenizer and a chat template."""
    path = tmp_path_factory.mktemp("models") / "model"
    made = build(parse(SIZES), 3)
    with torch.no_grad():
        made.epilogue.head.weight[2] *= 1.8  # so that answers end
    outsize.save(made, path)
    chats.tokenizer(path, chats.template("chatml", chats.PLAIN))
    return path


@pytest.fixture(scope="module")
def theirs(model):
    """The model and the tokenizer of transformers."""
    found = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64)
    return found.eval(), PreTrainedTokenizerFast.from_pretrained(str(model))


def continued(theirs, ids: list[int], count: int) -> list[int]:
    """What follows greedily, by a loop without a cache."""
    model, tokenizer = theirs
    new: list[int] = []
    with torch.no_grad():
        while len(new) < count:
            logits = model(torch.tensor([[*ids, *new]])).logits[0, -1]
            if int(logits.argmax()) == tokenizer.eos_token_id:
                break
            new.append(int(logits.argmax()))
    return new


# -- eval ------------------------------------------------------------------------------------------


def test_text_is_measured_as_a_plain_loop_measures_it(invoke, model, theirs, tmp_path) -> None:
    texts = ["the cat sat on the mat. naïve café €5\n" * 4, "a b c", "日本語"]
    file = chats.jsonl(tmp_path / "held.jsonl", [{"text": text} for text in texts])
    nats, count, right, size = 0.0, 0, 0, sum(len(text.encode()) for text in texts)
    network, tokenizer = theirs
    for text in texts:
        ids = tokenizer(text, add_special_tokens=False).input_ids
        ids = [tokenizer.eos_token_id, *ids, tokenizer.eos_token_id]
        for first in range(0, len(ids) - 1, 20):
            window = torch.tensor([ids[first : first + 21]])
            with torch.no_grad():
                logits = network(window[:, :-1]).logits[0]
            targets = window[0, 1:]
            nats += float(torch.nn.functional.cross_entropy(logits, targets, reduction="sum"))
            right += int((logits.argmax(-1) == targets).sum())
            count += len(targets)
    done = invoke("eval", model, "--on", file, "--sequence", 20, "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["documents"] == 3 and found["tokens"] == count
    assert found["loss"] == pytest.approx(nats / count, rel=1e-5)
    assert found["bits_per_byte"] == pytest.approx(nats / math.log(2) / size, rel=1e-5)
    assert found["right"] == right / count and "exact_match" not in found
    streamed = invoke("eval", model, "--on", file, "--sequence", 20, "--json", "--memory", "4MiB")
    again = json.loads(streamed.stdout)
    assert again["loss"] == pytest.approx(found["loss"], rel=1e-6)


def test_an_answer_matches_exactly_where_generation_gives_all_of_it(
    invoke, model, theirs, tmp_path
) -> None:
    _, tokenizer = theirs
    records = []
    for words in WORDS:
        asked = [{"role": "user", "content": words}]
        shown = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
        ids = tokenizer(shown, add_special_tokens=False).input_ids
        said = tokenizer.decode(continued(theirs, ids, 12))
        answer = said if said.strip() else "something else"
        records.append({"messages": [*asked, {"role": "assistant", "content": answer}]})
    wanted = 0
    for record in records:  # what is read back is what counts: tokens, and the end behind them
        shown = tokenizer.apply_chat_template(record["messages"], tokenize=False)
        start = tokenizer.apply_chat_template(
            record["messages"][:1], tokenize=False, add_generation_prompt=True
        )
        prompt = tokenizer(start, add_special_tokens=False).input_ids
        whole = tokenizer(shown.rstrip("\n"), add_special_tokens=False).input_ids
        said = whole[len(prompt) :]
        now = continued(theirs, prompt, len(said))
        wanted += now + [tokenizer.eos_token_id] * (len(now) < len(said)) == said
    assert 0 < wanted < len(WORDS)
    file = chats.jsonl(tmp_path / "chats.jsonl", records)
    done = invoke("eval", model, "--on", file, "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["exact_match"] == wanted / len(WORDS)
    said = invoke("eval", model, "--on", file).stdout
    assert f"{len(WORDS)} chats, " in said and f"{wanted} answered exactly" in said


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--on", "nowhere.txt"], "data path nowhere.txt does not exist"),
        (["--on", "README", "--set", "train.steps=3"], "expected a key of data"),
    ],
)
def test_what_cannot_be_measured_is_refused(invoke, model, words, complaint) -> None:
    done = invoke("eval", model, *words)
    assert done.exit_code == 2 and complaint in done.output and done.output.count("\n") == 1


# -- prompts and conversations ---------------------------------------------------------------------


def test_prompts_of_a_file_are_gone_on_with_one_by_one(invoke, model, theirs, tmp_path) -> None:
    _, tokenizer = theirs
    asked = [{"role": "user", "content": "the cat?"}]
    file = chats.jsonl(tmp_path / "p.jsonl", [{"prompt": "a b"}, {"messages": asked}])
    done = invoke("generate", model, "--prompts", file, "--max-tokens", 6)
    assert done.exit_code == 0, done.output
    first, second = map(json.loads, done.stdout.splitlines())
    plain = tokenizer("a b").input_ids  # whose tokenizer puts nothing in front
    shown = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
    ids = tokenizer(shown, add_special_tokens=False).input_ids
    for found, start in ((first, plain), (second, ids)):
        wanted = tokenizer.decode(continued(theirs, start, 6), skip_special_tokens=True)
        assert found["text"] == wanted
    assert first["prompt"] == "a b" and second["messages"] == asked
    lines = tmp_path / "p.txt"
    lines.write_text("a b\n\nthe\n")
    listed = invoke("generate", model, "--prompts", lines, "--max-tokens", 6).stdout.splitlines()
    assert [json.loads(one)["prompt"] for one in listed] == ["a b", "the"]
    assert json.loads(listed[0])["text"] == first["text"]


def test_a_chat_of_a_file_is_answered_anew_and_texts_where_a_template_is_named(
    invoke, model, theirs, tmp_path
) -> None:
    """What every form asks, by transformers' template and a plain loop; what it answers is left."""
    _, tokenizer = theirs
    user, gone = {"role": "user", "content": "the cat?"}, {"role": "assistant", "content": "two"}
    again, told = {"role": "user", "content": "a b"}, {"role": "system", "content": "be brief"}
    both = {"from": "human", "value": "the cat?"}, {"from": "gpt", "value": "two"}
    asked = [
        ({"messages": [told, user, gone, again, gone]}, [told, user, gone, again]),
        ({"conversations": [*both], "system": "be brief"}, [told, user]),
        ({"prompt": "the cat?", "completion": "two"}, [user]),
        ({"instruction": "the cat?", "input": ""}, [user]),
    ]
    file = chats.jsonl(tmp_path / "p.jsonl", [record for record, _ in asked])
    done = invoke("generate", model, "--prompts", file, "--max-tokens", 6)
    assert done.exit_code == 0, done.output
    found = [json.loads(line) for line in done.stdout.splitlines()]
    for one, (_, messages) in zip(found, asked, strict=True):
        shown = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        ids = tokenizer(shown, add_special_tokens=False).input_ids
        wanted = tokenizer.decode(continued(theirs, ids, 6), skip_special_tokens=True)
        assert one == {"messages": messages, "text": wanted}
    (lines := tmp_path / "p.txt").write_text("the cat?\n")
    words = ("generate", model, "--max-tokens", 6, "--template", "own")
    (line,) = invoke(*words, "--prompts", lines).stdout.splitlines()
    assert json.loads(line) == {"prompt": "the cat?", "text": found[3]["text"]}
    assert invoke(*words, "--prompt", "the cat?").stdout == found[3]["text"] + "\n"


def test_a_conversation_goes_on_with_all_that_was_said(invoke, model, monkeypatch) -> None:
    told: list[list[int]] = []
    generate = Model.generate

    def heard(one, prompt, *rest):
        told.append(list(prompt))
        return generate(one, prompt, *rest)

    monkeypatch.setattr(Model, "generate", heard)
    lines = iter(["hello", "/system be brief", "and now?", "/clear", "again", "/nothing",
                  "/clear", "/system", "€" * 33 + "ß" * 20, "more"])  # fmt: skip
    monkeypatch.setattr("builtins.input", lambda _: next(lines, None) or end())
    done = invoke("chat", model, "--max-tokens", 5)
    assert done.exit_code == 0, done.output
    tokenizer = PreTrainedTokenizerFast.from_pretrained(str(model))
    shown = [tokenizer.decode(ids) for ids in told]
    answers = done.stdout.splitlines()
    head = "<|im_start|>user\n"
    assert shown[0] == f"{head}hello<|im_end|>\n<|im_start|>assistant\n"
    assert shown[1].startswith("<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nhello")
    assert shown[1].endswith(f"{head}and now?<|im_end|>\n<|im_start|>assistant\n")
    assert "hello" not in shown[2] and "be brief" in shown[2] and "again" in shown[2]
    assert len(answers) >= 3 and "/clear begins anew" in done.stderr
    assert 123 < len(told[3]) < 128, "with room for less than five tokens"
    assert len(told) == 4 and "the context of 128 tokens is full" in done.stderr
    assert "and the model's context is 128; begin anew, or say less" in done.stderr


def end() -> str:
    raise EOFError


@pytest.mark.parametrize(
    ("record", "complaint"),
    [
        ({"text": "a"}, "expected a record with a text prompt"),
        ({"messages": [{"role": "assistant", "content": "a"}]}, "nobody asks anything"),
        ({"messages": [{"role": "user", "content": 3}]}, "message 1 has the content 3"),
        (None, "has no prompt in it"),
    ],
)
def test_prompts_that_are_none_are_refused(invoke, model, tmp_path, record, complaint) -> None:
    file = chats.jsonl(tmp_path / "p.jsonl", [] if record is None else [record])
    done = invoke("generate", model, "--prompts", file)
    assert done.exit_code == 2 and complaint in done.output and done.output.count("\n") == 1


def test_a_model_without_a_template_says_what_to_do(invoke, model, tmp_path) -> None:
    bare = tmp_path / "bare"
    outsize.save(outsize.load(model), bare)
    done = invoke("chat", bare, "--tokenizer", "bytes")
    assert done.exit_code == 2 and "has no chat template" in done.output
    assert "--template, one of alpaca" in done.output


# -- merge -----------------------------------------------------------------------------------------


def test_a_merged_model_is_the_plain_one_with_its_tokenizer(invoke, model, tmp_path) -> None:
    adapted = outsize.adapt(outsize.load(model), {"lora": {"rank": 4}})
    with torch.no_grad():
        for name, one in adapted.named_parameters():
            if one.requires_grad:
                one.normal_(std=0.2, generator=torch.Generator().manual_seed(len(name)))
    outsize.save(adapted, tmp_path / "adapter")
    done = invoke("merge", tmp_path / "adapter", "--into", tmp_path / "merged")
    assert done.exit_code == 0 and "rounding moved logits by" in done.stdout, done.output
    ids = torch.randint(0, 304, (2, 30), generator=torch.Generator().manual_seed(1))
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    with torch.no_grad():
        wanted, found = adapted(ids), plain(ids).logits
    assert float((found - wanted).abs().max()) <= 1e-4 * float(wanted.abs().max())
    assert (tmp_path / "merged" / "tokenizer_config.json").is_file()
    said = ("--prompt", "the cat", "--max-tokens", 8, "--no-echo")
    beside = invoke("generate", model, "--adapter", tmp_path / "adapter", *said)
    taken = invoke("generate", tmp_path / "merged", *said)
    assert beside.exit_code == 0 and beside.stdout == taken.stdout, beside.output
    assert beside.stdout != invoke("generate", model, *said).stdout
    talk = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    on = ("--on", chats.jsonl(tmp_path / "on.jsonl", [talk]))
    told = [invoke("eval", tmp_path / name, *on) for name in ("adapter", "merged")]
    assert told[0].exit_code == 0 and told[0].stdout == told[1].stdout, told[0].output
    faulty = invoke("generate", model, "--adapter", f"{tmp_path / 'adapter'}=much", *said)
    assert faulty.exit_code == 2 and "'much' is no finite number" in faulty.output
    half = invoke("merge", tmp_path / "adapter", "--into", tmp_path / "h", "--dtype", "bfloat16")
    kinds = {x.dtype for x in load_file(tmp_path / "h" / "model.safetensors").values()}
    assert half.exit_code == 0 and kinds == {torch.bfloat16}
    again = invoke("merge", tmp_path / "merged", "--into", tmp_path / "other")
    assert again.exit_code == 2 and "has no adapter" in again.output


def test_a_directory_of_an_adapter_may_have_an_equals_sign_in_its_name(tmp_path):
    (tmp_path / "lr=0.1").mkdir()
    named = adapters_of([f"{tmp_path}/lr=0.1", f"{tmp_path}/lr=0.1=-2"])
    assert named == [(f"{tmp_path}/lr=0.1", 1.0), (f"{tmp_path}/lr=0.1", -2.0)]
