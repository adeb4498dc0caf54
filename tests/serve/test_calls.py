"""Tools, called as a model's own template writes calls."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import tokenizers
import torch
from decoders import SMALL
from serving import KEY, ROOM, asked, served

from outsize.data.template import Template
from outsize.data.tokenizer import ByteTokenizer, FileTokenizer, Tokenizer, open_tokenizer
from outsize.decode.samplers import Sampling
from outsize.errors import OutsizeError
from outsize.models.build import build
from outsize.models.families import parse
from outsize.serve.asks import Token
from outsize.serve.calls import Call, CallForm, form_of
from outsize.serve.engine import Engine
from outsize.serve.http.choices import Piece, calling
from outsize.serve.http.shapes import Shaped, Shapes
from outsize.serve.model import Model
from outsize.serve.policies import POLICIES
from outsize.serve.talk import Talk

KEPT = Path(__file__).parents[1] / "support" / "templates"
# As Mistral and Llama 3.1 write calls: in one list behind a token, with ids; alone and bare.
LISTED = """{{ bos_token }}{% if tools %}[TOOLS] {{ tools | tojson }}[/TOOLS]{% endif %}
{%- for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }}[/INST]
{%- elif m.tool_calls %}[TOOL_CALLS] [{% for c in m.tool_calls -%}
{"name": {{ c.function.name | tojson }}, "arguments": {{ c.function.arguments | tojson }},
{{- ' ' }}"id": "{{ c.id }}"}{% if not loop.last %}, {% endif %}{% endfor %}]{{ eos_token }}
{%- elif m.role == 'tool' %}[R]{{ m.tool_call_id }}: {{ m.content }}[/R]
{%- else %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"""
BARE = """{% for m in messages %}<|h|>{{ m.role }}:
{%- if tools and loop.last and add_generation_prompt %}{{ tools | tojson }}{% endif %}
{%- if m.tool_calls %}{% if m.tool_calls | length > 1 %}{{ raise_exception('one') }}{% endif -%}
{"name": "{{ m.tool_calls[0].function.name }}", "parameters": {# -#}
{{ m.tool_calls[0].function.arguments | tojson }}}{{ eos_token }}
{%- else %}{{ m.content }}{{ eos_token }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}<|h|>assistant:{% endif %}"""
SCHEMAS: dict[str, dict[str, Any]] = {
    "add": {"type": "object", "properties": {"a": {"type": "integer", "maximum": 9, "minimum": 0},
                                             "b": {"enum": [1, 2]}},
            "required": ["a", "b"], "additionalProperties": False},
    "now": {"type": "object", "properties": {}, "additionalProperties": False},
}  # fmt: skip
TOOLS = [{"type": "function", "function": {"name": name, "description": "d", "parameters": schema}}
         for name, schema in SCHEMAS.items()]  # fmt: skip


def template(text: str) -> Template:
    return Template("t", text, {"eos_token": "</s>", "bos_token": "<s>"}, ("</s>",))


def test_forms_are_those_of_the_templates() -> None:
    qwen = form_of(template((KEPT / "qwen2.5.jinja").read_text(encoding="utf-8")))
    assert qwen == CallForm(
        "<tool_call>\n", "\n</tool_call>\n<tool_call>\n", "\n</tool_call>", '{"name": "',
        '", "arguments": ', "}", "", True,
    )  # fmt: skip
    listed = form_of(template(LISTED))
    assert (listed.begin, listed.between, listed.end) == ("[TOOL_CALLS] [", ", ", "]")
    assert listed.id and listed.tail == f', "id": "{listed.id}"}}' and listed.several
    bare = form_of(template(BARE))
    assert (bare.begin, bare.end, bare.middle, bare.several) == ("", "", '", "parameters": ', False)
    with pytest.raises(OutsizeError, match="no place for them"):
        form_of(template((KEPT / "chatml.jinja").read_text(encoding="utf-8")))
    spoken = BARE.replace('{"name": "', "call:").replace('", "parameters": ', " with ")
    with pytest.raises(OutsizeError, match="does not write calls as JSON"):
        form_of(template(spoken))


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A tokenizer in which one call begins with a special token, another with a word of one."""
    inner = tokenizers.Tokenizer(tokenizers.models.BPE())
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, special_tokens=["</s>", "[TOOL_CALLS]"], show_progress=False,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    inner.train_from_iterator(['{"name": "add", "arguments": {"a": 1}}'] * 2, trainer)
    inner.add_tokens([tokenizers.AddedToken("<tool_call>", special=False)])
    folder = tmp_path_factory.mktemp("words")
    inner.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "</s>"}', encoding="utf-8")
    return open_tokenizer(str(folder))


def drawn(
    text: Tokenizer, form: CallForm, must: bool, liked: dict[int, float], seed: int
) -> list[int]:
    """What a model that knows nothing says, its end left out; liked: biases of first tokens."""
    vocab = text.vocab_size + 3
    matcher = Shapes(text, vocab, [text.eos]).calling(form, SCHEMAS, must, True)
    sampler, ids = Shaped(Sampling(1.0, seed=seed), matcher), list[int]()
    seeded = torch.Generator().manual_seed(seed)
    while not ids or ids[-1] != text.eos:
        logits_V = torch.randn(vocab, generator=seeded)
        logits_V[text.eos] += 2
        for one, more in liked.items() if not ids else ():
            logits_V[one] += more
        ids.append(sampler(logits_V, len(ids)))
        assert len(ids) < 400
    return ids[:-1]


def shown(text: Tokenizer, form: CallForm, ids: list[int], reason: str = "stop") -> list[Piece]:
    """An answer of these tokens as it is told, one by one."""

    async def told() -> AsyncGenerator[Piece, None]:
        stream = text.stream()
        for one in ids:
            yield Piece(stream.push(one), (Token(one),))
        yield Piece(stream.finish(), (), reason)

    async def every() -> list[Piece]:
        return [one async for one in calling(told(), text, form)]

    return asyncio.run(every())


@pytest.mark.parametrize("name", ["qwen", "listed", "bare"])
def test_what_is_called_was_offered(words: Tokenizer, name: str) -> None:
    qwen = (KEPT / "qwen2.5.jinja").read_text(encoding="utf-8")
    form = form_of(template({"qwen": qwen, "listed": LISTED, "bare": BARE}[name]))
    assert isinstance(words, FileTokenizer)
    first = words.encode({"qwen": "<tool_call>", "listed": "[TOOL_CALLS]", "bare": "{"}[name])[0]
    counts, names = set[int](), set[str]()
    for seed in range(6):
        for must, liked in ((True, {}), (False, {first: 50.0})):
            ids = drawn(words, form, must, liked, seed)
            pieces = shown(words, form, ids)
            calls = pieces[-1].calls
            counts.add(len(calls))
            assert calls and pieces[-1].reason == "tool_calls"
            assert "".join(one.text for one in pieces) == ""
            for one in calls:
                names.add(one.name)
                arguments = json.loads(one.arguments)
                assert set(arguments) == set(SCHEMAS[one.name]["properties"])
    assert names == {"add", "now"} and (counts == {1}) == (name == "bare")


def test_what_is_said_before_is_said(words: Tokenizer) -> None:
    """Texts without calls, with one behind, and with one that is cut off."""
    for kind, begin in (((KEPT / "qwen2.5.jinja").read_text(encoding="utf-8"), "Well.\n"),
                        (LISTED, "Well. ")):  # fmt: skip
        form = form_of(template(kind))
        call = form.head + "now" + form.middle + "{}" + form.tail
        for said, calls in (
            (begin + form.begin + call + form.between + call + form.end, 2),
            (begin + form.begin + call[:-4], 0),
            (begin + "{}<tool_call and more", 0),
        ):
            pieces = shown(words, form, words.encode(said))
            text = "".join(one.text for one in pieces)
            assert list(pieces[-1].calls) == [Call("now", "{}")] * calls
            assert pieces[-1].reason == ("tool_calls" if calls else "stop")
            cut = shown(words, form, words.encode(said), "length")[-1]
            assert cut.calls == pieces[-1].calls and cut.reason == "length"
            assert text == (said if form.begin not in said else begin)
            assert sum(len(one.tokens) for one in pieces) == len(words.encode(said))
    form = form_of(template(BARE))
    said = '{"name": is no call'
    pieces = shown(words, form, words.encode(said))
    assert "".join(one.text for one in pieces) == said and not pieces[-1].calls


def test_a_template_may_want_a_system_message() -> None:
    """Which what finds its ends by a plain question has not: texts' own ends are left."""
    text = "{% if messages[0].role != 'system' %}{{ raise_exception('alone') }}{% endif %}{{ 1 }}"
    model = Model(build(parse({**SMALL, "model_type": "llama", "vocab_size": 257}), seed=3))
    assert Talk(model, ByteTokenizer(), template(text)).ends == {256}


@pytest.fixture(scope="module")
def address() -> Iterator[tuple[str, int]]:
    config = {**SMALL, "model_type": "llama", "vocab_size": 257, "initializer_range": 0.5}
    engine = Engine(Model(build(parse(config), seed=3)), ROOM, POLICIES.get("mixed"))
    text = ByteTokenizer()
    short = Template("t", BARE.replace("tools | tojson", "tools | length"), {"eos_token": ""}, ())
    with served(engine, "on", Talk(engine.model, text, short)) as found:
        yield found


def test_openais_client_calls_and_answers(address: tuple[str, int]) -> None:
    host, port = address
    client = openai.OpenAI(base_url=f"http://{host}:{port}/v1", api_key=KEY, max_retries=0)
    said: list[Any] = [{"role": "user", "content": "4 + 1?"}]
    ask: dict[str, Any] = {
        "model": "small", "tools": TOOLS, "tool_choice": "required", "max_tokens": 90, "seed": 2
    }  # fmt: skip
    found = client.chat.completions.create(messages=said, **ask).choices[0]
    assert found.finish_reason == "tool_calls" and found.message.content is None
    (call,) = found.message.tool_calls or ()
    assert call.type == "function" and call.function.name in SCHEMAS
    streamed = list(client.chat.completions.create(messages=said, **ask, stream=True))
    (last,) = [one.choices[0] for one in streamed if one.choices[0].delta.tool_calls]
    (part,) = last.delta.tool_calls or ()
    assert last.finish_reason == "tool_calls" and part.index == 0 and part.function is not None
    assert part.function.arguments == call.function.arguments
    named = {"type": "function", "function": {"name": "now"}}
    one = client.chat.completions.create(messages=said, **{**ask, "tool_choice": named})
    assert [
        x.function.name for x in one.choices[0].message.tool_calls or () if x.type == "function"
    ] == ["now"]
    said += [found.message, {"role": "tool", "tool_call_id": call.id, "content": "5"}]
    plain = client.chat.completions.create(
        model="small", messages=said, tools=TOOLS, tool_choice="none", max_tokens=3  # type: ignore[arg-type]
    )  # fmt: skip
    assert plain.choices[0].message.tool_calls is None


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"tools": [TOOLS[0], TOOLS[0]]}, "add comes twice"),
        ({"tool_choice": {"type": "function", "function": {"name": "x"}}}, "none of the tools"),
        ({"tools": None, "tool_choice": "required"}, "without tools"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name"),
        ({"tools": [{"type": "function", "function": {"name": "a", "parameters": {"type": "x"}}}]},
         "tools: a schema cannot be compiled"),
        ({"messages": [{"role": "tool", "content": "5"}]}, "messages.0.tool.tool_call_id"),
        ({"messages": [{"role": "user", "content": None}]}, "messages.0.user.content"),
        ({"messages": [{"role": "assistant", "tool_calls": [
            {"id": "1", "function": {"name": "a", "arguments": "[1]"}}]}]},
         "expected JSON of an object"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said(address: tuple[str, int], more: dict[str, Any], words: str) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "tools": TOOLS, **more}
    status, answer, _ = asked(address, "/v1/chat/completions", body)
    assert status == 400 and words in answer["error"]["message"]
