"""`outsize data`: what is shown of samples against their documents, pages, trained tokenizers."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser

import chats
import pytest
from chats import CHATS, jsonl, messages, template
from click.testing import CliRunner

from outsize.cli.main import main
from outsize.data import FileTokenizer, open_tokenizer
from outsize.decode.text import prompt_ids


def called(*words: object) -> str:
    result = CliRunner().invoke(main, ["data", *map(str, words)])
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture
def home(tmp_path):
    chats.tokenizer(tmp_path / "model", template("chatml"))
    said = [{"messages": messages(chat)} for chat in CHATS]
    said[2]["messages"][1]["weight"] = 0.5
    jsonl(tmp_path / "chats.jsonl", said)
    return tmp_path


def test_targets_are_marked_and_what_is_cut_off_is_shown(home):
    printed = called("show", home / "chats.jsonl", "--model", home / "model", "--sequence", 70)
    assert "⟦sat on the mat<|im_end|>⟧\n" in printed
    assert "⟦a<|im_end|>⟧×0.5\n" in printed
    assert "<|im_start|>user\nthe cat?<|im_end|>\n<|im_start|>assistant\n⟦" in printed
    found = [re.search(r"chats\.jsonl:(\d): (\d+) tokens, (\d+) targets(.*)", line)
             for line in printed.splitlines()]  # fmt: skip
    rows = [one.groups() for one in found if one]
    assert [row[0] for row in rows] == ["1", "2", "3"]
    # Against the documents as a run has them.
    whole = called("show", home / "chats.jsonl", "--model", home / "model", "--sequence", 999)
    lengths = [int(n) for n in re.findall(r": (\d+) tokens, \d+ targets", whole)]
    assert [int(row[1]) for row in rows] == lengths
    cuts = [max(0, length - 71) for length in lengths]
    assert [f", {cut} cut off" if cut else "" for cut in cuts] == [row[3] for row in rows]
    assert sum(map(bool, cuts)) == 1 and "⟪" in printed and "⟪" not in whole
    assert f"1 longer than a row of 70, by {sum(cuts)} tokens" in printed
    targets = sum(int(row[2]) for row in rows)
    share = targets / (sum(lengths) - sum(cuts))
    assert f"{targets} targets, {share:.1%} of the tokens" in printed


def test_a_model_is_what_a_run_takes_for_one(home):
    words = ("show", home / "chats.jsonl", "--sequence", 70, "--model")
    (home / "adapter").mkdir()
    said = {"base_model_name_or_path": str(home / "model"), "peft_type": "LORA"}
    (home / "adapter" / "adapter_config.json").write_text(json.dumps(said))
    assert called(*words, home / "adapter") == called(*words, home / "model")
    result = CliRunner().invoke(main, ["data", *map(str, words), "tinny"])
    assert (
        result.exit_code == 2
        and "'tinny' is neither a preset nor a directory; did" in result.output
    )


class Reading(HTMLParser):
    """The text in <pre>, and that of its parts by tag."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text, self.marked = "", []

    def handle_starttag(self, tag, attrs):
        assert tag not in ("script", "img", "iframe")
        self.open.append(tag)

    def handle_endtag(self, tag):
        while self.open and self.open.pop() != tag:
            pass

    def handle_data(self, data):
        if "pre" in self.open and "sup" not in self.open:
            self.text += data
            if "mark" in self.open:
                self.marked.append(data)


def test_the_page_says_the_same_and_holds_all_it_needs(home):
    file = home / "page.html"
    called("show", home / "chats.jsonl", "--model", home / "model", "--page", file)
    page = file.read_text()
    read = Reading()
    read.feed(page)
    assert read.marked[0] == "sat on the mat<|im_end|>"
    assert "日本語 <b>&amp;</b>" in read.text, "what is said is text, not markup"
    assert "://" not in page and "default-src 'none'" in page


def test_texts_are_all_targets_and_bytes_need_no_model(tmp_path):
    (tmp_path / "a.txt").write_text("naïve\n")
    printed = called("show", tmp_path / "a.txt")
    assert "⟦naïve\n<|end|>⟧" in printed and "100.0% of the tokens" in printed


def test_a_bad_record_or_no_template_is_a_line(home):
    (home / "body.jsonl").write_text('{"body": "a"}')
    for words, said in (
        ((home / "chats.jsonl",), "error: tokenizer bytes has no chat template"),
        (
            (home / "body.jsonl",),
            f"error: data in {home}/body.jsonl is empty: skipped 1 unreadable"
            f" (first: {home}/body.jsonl:1: no field 'text' (fields: 'body'); data.field names",
        ),
        ((home / "none.jsonl",), f"error: data path {home}/none.jsonl does not exist"),
        ((home / "chats.jsonl", "--sequence", "0"), "error: Invalid value for '--sequence'"),
    ):
        result = CliRunner().invoke(main, ["data", "show", *map(str, words)])
        assert result.exit_code == 2 and result.output.startswith(said), result.output


def test_a_run_file_is_shown_as_the_run_reads_it(home):
    run = home / "run.yaml"
    run.write_text(json.dumps({
        "model": str(home / "model"), "data": {"path": str(home / "chats.jsonl"), "chat": False,
                                               "field": "messages"},
    }))  # fmt: skip
    result = CliRunner().invoke(main, ["data", "show", str(run)])
    assert result.exit_code == 2 and "is empty" in result.output  # no text among the fields
    run.write_text(json.dumps({
        "model": str(home / "model"), "train": {"sequence": 77}, "data": str(home / "chats.jsonl")
    }))  # fmt: skip
    assert "longer than a row of 77" in called("show", run)


def test_a_trained_tokenizer_is_the_same_each_time_and_loads_in_transformers(home):
    transformers = pytest.importorskip("transformers")
    (home / "a.txt").write_text("the cat sat on the mat, naïve café\n" * 9)
    made = []
    for name in ("one", "two"):
        printed = called("tokenizer", home / "a.txt", home / "chats.jsonl", "--vocabulary", 300,
                         "--into", home / name)  # fmt: skip
        made.append((home / name / "tokenizer.json").read_bytes())
    assert made[0] == made[1] and f"{home}/two: 300 ids, " in printed
    ours = open_tokenizer(str(home / "one"))
    assert isinstance(ours, FileTokenizer) and ours.vocab_size == 300
    theirs = transformers.AutoTokenizer.from_pretrained(str(home / "one"))
    text = "the cat 日本語 \U0001f600\n\n<|im_start|>sat<|im_end|>"
    ids = ours.encode(text)
    assert ids == theirs.encode(text, add_special_tokens=False)
    assert prompt_ids(ours, text) == theirs.encode(text) == [ours.eos, *ids], "as it is trained"
    assert theirs.decode(ids) == text and ours.eos == theirs.eos_token_id
    assert len(ours.encode("the cat sat on the mat")) < 12, "merges were learnt"
    said = messages(CHATS[0])
    written = theirs.apply_chat_template(said, tokenize=False)
    assert written.endswith("<|im_start|>assistant\nsat on the mat<|im_end|>\n")
    assert "⟦sat on the mat<|im_end|>⟧" in called("show", home / "chats.jsonl", "--model",
                                                   home / "one")  # fmt: skip


def test_what_a_tokenizer_cannot_be_trained_on_is_a_line(home):
    (home / "a.txt").write_text("the cat")
    words = ["data", "tokenizer", str(home / "a.txt"), "--vocabulary"]
    for more, said in (
        (["9", "--into", str(home / "t")], "error: --vocabulary is 9; expected 259 to 1048576"),
        (["300", "--into", str(home / "model")], "has a tokenizer.json already"),
    ):
        result = CliRunner().invoke(main, [*words, *more])
        assert result.exit_code == 2 and said in result.output
    small = called("tokenizer", home / "a.txt", "--vocabulary", 300, "--into", home / "t")
    assert "ids (of 300: the text has no more pairs)" in small
