"""Targets of chats by thirteen templates in the shape of well-known models', against a second
implementation that knows no renderings of beginnings: it finds each answer's text in the whole
chat, behind what the template writes before answers and with what it ends them with, and counts
bytes of tokens. Where a template writes earlier turns otherwise it renders each as it was said."""

from __future__ import annotations

import functools
import json
import random
from dataclasses import dataclass
from pathlib import Path

import chats
import jinja2
import pytest
from chats import jsonl
from tokenizers import Tokenizer as Inner
from tokenizers import decoders, models, pre_tokenizers, trainers

from outsize.data import Given, open_tokenizer
from outsize.data.files import find_files
from outsize.data.sources import ReadLog
from outsize.data.template import template_of
from outsize.errors import OutsizeError
from outsize.techniques.data.chat import Chat, ChatSource

HERE = Path(chats.__file__).parent / "templates"
CHATS = 32  # of each template: 416 in all


@dataclass(frozen=True)
class Shape:
    """What stands before an answer and ends it; trims: white space around it goes. systems, tools:
    what it takes. thinks: it leaves the thinking of earlier turns out; early: of each."""

    head: str
    end: str
    trims: bool = False
    systems: bool = True
    tools: bool = False
    thinks: bool = False
    early: bool = False


SHAPES = {
    "chatml": Shape("<|im_start|>assistant\n", "<|im_end|>"),
    "llama2": Shape(" [/INST]", " </s>", trims=True),
    "llama3": Shape("assistant<|end_header_id|>\n\n", "<|eot_id|>", trims=True),
    "mistral": Shape("[/INST]", "</s>"),
    "qwen2.5": Shape("<|im_start|>assistant\n", "<|im_end|>", tools=True),
    "qwen3": Shape("<|im_start|>assistant\n", "<|im_end|>", thinks=True),
    "gemma": Shape("<start_of_turn>model\n", "<end_of_turn>", trims=True, systems=False),
    "phi3": Shape("<|assistant|>\n", "<|end|>"),
    "zephyr": Shape("<|assistant|>\n", "</s>"),
    "deepseek-r1": Shape("<｜Assistant｜>", "<｜end▁of▁sentence｜>", thinks=True, early=True),
    "command-r": Shape("<|CHATBOT_TOKEN|>", "<|END_OF_TURN_TOKEN|>", trims=True),
    "vicuna": Shape(" ASSISTANT:", "</s>", trims=True),
    "granite": Shape("assistant<|end_of_role|>", "<|end_of_text|>"),
}
SPECIAL = [
    "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>",
    "<|eot_id|>", "<start_of_turn>", "<end_of_turn>", "<|assistant|>", "<|user|>", "<|end|>",
    "<|endoftext|>", "<｜Assistant｜>", "<｜User｜>", "<｜end▁of▁sentence｜>", "<think>",
    "</think>", "<|START_OF_TURN_TOKEN|>", "<|CHATBOT_TOKEN|>", "<|USER_TOKEN|>",
    "<|END_OF_TURN_TOKEN|>", "<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>",
]  # fmt: skip
EOS = {"phi3": "<|endoftext|>"}
WORDS = [
    "the",
    "cat",
    "sat",
    "on",
    "",
    "the",
    "mat",
    "naïve",
    "café",
    "€5",
    "日本語",
    "😀",
    "def",
    "f(x):\n\treturn\n\n",
    "x",
]


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    """A byte-level tokenizer whose tokens go over words and lines."""
    home = tmp_path_factory.mktemp("tokenizer")
    inner = Inner(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    inner.train_from_iterator(
        [" ".join(WORDS)] * 20 + ["assistant\n\n user\n\n\n"] * 20,
        trainers.BpeTrainer(vocab_size=340, initial_alphabet=alphabet, special_tokens=SPECIAL),
    )
    inner.save(str(home / "tokenizer.json"))
    return home


def talk(draw: random.Random, shape: Shape) -> dict:
    def text(tag: str) -> str:
        white = ["", "", " ", "\n", " \n"]
        inner = " ".join(draw.choices(WORDS, k=draw.randint(1, 9)))
        return draw.choice(white) + f"{tag}{draw.randint(0, 10**9)} {inner} ." + draw.choice(white)

    def answer() -> str:
        made = text("a")
        return f"<think>\nhm {made.strip()}\n</think>\n\n{made}" if thinking() else made

    def thinking() -> bool:
        return shape.thinks and draw.random() < 0.5

    said = []
    if shape.systems and draw.random() < 0.4:
        said.append({"role": "system", "content": text("s")})
    for _ in range(draw.randint(1, 4)):
        said.append({"role": "user", "content": text("u")})
        if shape.tools and draw.random() < 0.4:
            call = {"name": "look", "arguments": json.dumps({"at": draw.randint(0, 10**9)})}
            said.append({
                "role": "assistant", "content": draw.choice([None, text("a")]),
                "tool_calls": [{"id": "1", "type": "function", "function": call}],
            })  # fmt: skip
            said += [{"role": "tool", "content": text("t")}] * draw.randint(1, 2)
        said.append({"role": "assistant", "content": answer()})
    if shape.systems and draw.random() < 0.2:  # nobody answers
        said.append({"role": "user", "content": text("u")})
    tool = {"type": "function", "function": {"name": "look", "parameters": {}}}
    return {"messages": said, "tools": [tool] if shape.tools else None}


# -- the second implementation ---------------------------------------------------------------------


@functools.cache
def compiled(name: str) -> jinja2.Template:
    made = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    made.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    return made.from_string((HERE / f"{name}.jinja").read_text())


def rendered(name: str, record: dict, count: int, prompt: bool = False) -> str:
    said = json.loads(json.dumps(record["messages"][:count]))
    for call in (call for one in said for call in one.get("tool_calls") or []):
        call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    return compiled(name).render(
        messages=said, tools=record["tools"], add_generation_prompt=prompt, bos_token="<s>",
        eos_token=EOS.get(name, SHAPES[name].end.strip()),
    )  # fmt: skip


def naive(name: str, record: dict) -> list[tuple[str, list[tuple[int, int]]]]:
    """Texts, and the characters of each that are targets."""
    shape, said = SHAPES[name], record["messages"]
    whole, at = rendered(name, record, len(said)), 0
    found, spans = [], []
    last = max(i for i, one in enumerate(said) if one["role"] == "user")
    for index, one in enumerate(said):
        if one["role"] != "assistant":
            continue
        if name == "qwen3" and index != len(said) - 1:
            # Written without thinking once others follow, and with it, if empty, as it is said.
            text = rendered(name, record, index + 1)
            start = text.rindex(shape.head) + len(shape.head)
            if index < last:
                found.append((text, [(start, text.rindex(shape.end) + len(shape.end))]))
                at = whole.index(shape.head, at) + 1
                continue
        if name == "mistral" and said[0]["role"] == "system":
            # The system's message is in the last message of the user, as long as it is the last.
            before = rendered(name, record, index, True)
            text = f"{before} {one['content']}{shape.end}"
            found.append((text, [(len(before), len(text))]))
            continue
        content = one["content"] or ""
        if shape.early or name == "qwen3":
            content = content.split("</think>")[-1]
        content = content.strip() if shape.trims else content
        place = whole.index(shape.head, at) + len(shape.head)
        if one.get("tool_calls"):
            stop = whole.index(shape.end, place) + len(shape.end)
        else:
            stop = whole.index(content.strip(), place) + len(content.strip())
            stop = whole.index(shape.end, stop) + len(shape.end)
            assert whole[place:stop].strip().startswith((content.strip()[:9], "<think>"))
        spans.append((place, stop))
        at = stop
    if spans:
        found.append((whole, spans))
    return found


def masked(inner: Inner, text: str, spans: list[tuple[int, int]]) -> tuple[list[int], list[int]]:
    """Ids, and 1 for each with a byte in a span: by the bytes that each id's own text has."""
    encoded = inner.encode(text, add_special_tokens=False)
    edges = [(len(text[:a].encode()), len(text[:b].encode())) for a, b in spans]
    mask, at = [], 0
    for one in encoded.ids:
        word = inner.id_to_token(one)
        size = len(word.encode()) if word in SPECIAL else len(word)
        mask.append(int(any(at < b and at + size > a for a, b in edges)))
        at += size
    assert at == len(text.encode())
    return encoded.ids, mask


@pytest.mark.parametrize("name", SHAPES)
def test_targets_are_those_of_a_second_implementation(tmp_path, directory, name):
    draw, shape = random.Random(name), SHAPES[name]
    (directory / "tokenizer_config.json").write_text(json.dumps(
        {"bos_token": "<s>", "eos_token": EOS.get(name, shape.end.strip())}
    ))  # fmt: skip
    (directory / "chat_template.jinja").write_text((HERE / f"{name}.jinja").read_text())
    records = [talk(draw, shape) for _ in range(CHATS)]
    tokenizer = open_tokenizer(str(directory))
    files = find_files((str(jsonl(tmp_path / "chats.jsonl", records)),)).files
    given = Given(files, 0, tokenizer, str(directory), 0, 0.0, "text")
    log = ReadLog()
    source = ChatSource(given, Chat(), template_of(str(directory), tokenizer))
    found: dict[str, list] = {}
    for one in source.documents(log):
        found.setdefault(one.where, []).append((one.ids.tolist(), one.weights.tolist()))
    inner = Inner.from_file(str(directory / "tokenizer.json"))
    for (where, mine), record in zip(found.items(), records, strict=True):
        wanted = [masked(inner, *one) for one in naive(name, record)]
        assert sorted(mine) == sorted(wanted), where
    own = name == "qwen3" or name == "mistral"
    assert bool(log.apart) == own and not log.unended and not log.unread


def test_a_template_that_joins_arguments_to_its_text_gets_text(tmp_path):
    """As DeepSeek's, where others write an object."""
    (tmp_path / "own.jinja").write_text(
        "{% for m in messages %}{{ m.content or '' }}{% for c in m.tool_calls or [] %}"
        "{{ '<' + c.function.name + c.function.arguments + '>' }}{% endfor %}{% endfor %}"
    )
    own = template_of(None, open_tokenizer("bytes"), str(tmp_path / "own.jinja"))
    call = {"name": "f", "arguments": {"a": {"b": [1, "é", None]}}}
    said = {"role": "assistant", "content": None, "tool_calls": [{"function": call}]}
    text, _ = own.render("here", [{"role": "user", "content": "q"}, said], None, False)
    assert text == 'q<f{"a": {"b": [1, "é", null]}}>'
    assert call["arguments"] == {"a": {"b": [1, "é", None]}}


def test_a_template_that_wants_parts_or_empty_texts_gets_them(tmp_path):
    """As those of models that see pictures, and as GPT-OSS's, which looks into every content."""
    call = {"function": {"name": "f", "arguments": {"a": 1}}}
    said = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    calls = [said[0], {"role": "assistant", "content": None, "tool_calls": [call]}]
    parts = "{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}{% endif %}{% endfor %}"
    wants = "{% for p in m.content %}{{ p.text.strip() }}{% endfor %}"
    looks = "{{ 'x' in m.content }}{{ m.content }}{% if m.tool_calls %}{{ m.tool_calls[0].function"
    looks += ".arguments['a'] }}{% endif %}"
    cases = [(parts, said, "q;a;"), (wants, said, "q;a;"), (looks, calls, "Falseq;False1;")]
    for one, messages, written in cases:
        (tmp_path / "own.jinja").write_text("{% for m in messages %}" + one + ";{% endfor %}")
        own = template_of(None, open_tokenizer("bytes"), str(tmp_path / "own.jinja"))
        assert own.render("here", messages, None, False)[0] == written
    assert calls[1]["content"] is None and said[0]["content"] == "q"


def test_chatml_writes_calls_as_qwen_does_and_what_writes_none_refuses_them():
    call = {"name": "weather", "arguments": {"city": "Rome", "days": [1, 2]}}
    said = {"role": "assistant", "content": None, "tool_calls": [{"function": call}]}
    messages = [
        {"role": "system", "content": "be brief"}, {"role": "user", "content": "sun?"},
        said, *({"role": "tool", "content": one} for one in ("yes", "no")),
        {**said, "content": "and"}, {"role": "assistant", "content": "It is."},
    ]  # fmt: skip
    of = functools.partial(template_of, None, open_tokenizer("bytes"))
    qwen = of(str(HERE / "qwen2.5.jinja"))
    for count in range(1, len(messages) + 1):
        here = ("here", messages[:count], None, True)
        assert of("chatml").render(*here) == qwen.render(*here)
    tools = [{"type": "function", "function": {"name": "weather"}}]
    text, _ = of("chatml").render("here", messages, tools, False)
    theirs, _ = qwen.render("here", messages, tools, False)
    assert theirs[theirs.index("<tools>\n") : theirs.index("</tools>")] in text
    assert text.partition("<|im_end|>")[2] == theirs.partition("<|im_end|>")[2]
    with pytest.raises(OutsizeError, match=r"here: the assistant calls a tool, and .* gemma"):
        of("gemma").render("here", messages, None, False)
