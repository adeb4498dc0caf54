"""The chat template of a tokenizer, rendered by Jinja in a sandbox as transformers does.

A template is somebody else's program: in the sandbox it can change nothing and reach no attribute
that begins with an underscore.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from outsize.data.tokenizer import Tokenizer, settings_in
from outsize.errors import OutsizeError

Span = tuple[int, int]  # characters [start, stop)
Message = Mapping[str, Any]

# "Chat Markup Language", as OpenAI published it; what the assistant says is marked.
CHATML = (
    r"{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    r"{% if message['role'] == 'assistant' %}"
    r"{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    r"{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
    r"{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_NAMES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
_MARK = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")


@dataclass(frozen=True)
class Template:
    """name: where it was read, for errors. special: what it may call by name (`eos_token`). ends:
    the texts of special tokens, one of which ends an answer."""

    name: str
    text: str
    special: Mapping[str, str]
    ends: tuple[str, ...]

    @cached_property
    def _compiled(self) -> _Compiled:
        return _Compiled(self.text, self.name)

    def spans(
        self, where: str, messages: Sequence[Message], tools: Sequence[Any] | None = None
    ) -> tuple[str, list[Span]]:
        """A chat written out, and where in it the assistant speaks. where: the chat's place, for
        errors. OutsizeError for a template that fails, or by which nobody can tell."""
        text, marks = self._render(where, messages, tools, False)
        if _MARK.search(self.text):
            if not marks:
                raise OutsizeError(f"{where}: the chat template of {self.name} marks no answer")
            return text, marks
        answers = (i for i, one in enumerate(messages) if one["role"] == "assistant")
        return text, [self._answer(where, text, messages, tools, index) for index in answers]

    def _answer(
        self,
        where: str,
        text: str,
        messages: Sequence[Message],
        tools: Sequence[Any] | None,
        index: int,
    ) -> Span:
        """Of message `index`, between two beginnings of the chat."""
        before, _ = self._render(where, messages[:index], tools, True)
        upto, _ = self._render(where, messages[: index + 1], tools, False)
        if not (text.startswith(upto) and upto.startswith(before)):
            raise OutsizeError(
                f"{where}: the chat template of {self.name} does not write the first {index + 1}"
                " messages as the beginning of the whole chat, so that nobody can tell where the"
                " answer is; put {% generation %} ... {% endgeneration %} around it in the template"
            )
        said = upto[len(before) :]
        bare = said.rstrip()
        return len(before), len(before) + len(bare if bare.endswith(self.ends) else said)

    def _render(
        self, where: str, messages: Sequence[Message], tools: Sequence[Any] | None, prompt: bool
    ) -> tuple[str, list[Span]]:
        values = {
            **self.special, "messages": list(messages), "tools": tools, "documents": None,
            "add_generation_prompt": prompt,
        }  # fmt: skip
        try:
            return self._compiled.render(values)
        except Exception as error:  # the template's own: whatever it divides, indexes, raises
            why = " ".join(str(error).split())[:160]
            raise OutsizeError(f"{where}: the chat template of {self.name} fails: {why}") from None


class _Compiled:
    """A template in its sandbox, which keeps where `generation` blocks came to lie."""

    def __init__(self, text: str, name: str) -> None:
        import jinja2

        try:
            self._template = _environment(self).from_string(text)
        except jinja2.TemplateError as error:
            raise OutsizeError(f"chat template of {name} cannot be read: {error}") from None
        self._written: list[str] = []
        self._marks: list[Span] = []

    def mark(self, said: str) -> None:
        """A block that is written next."""
        start = sum(map(len, self._written))
        self._marks.append((start, start + len(said)))

    def render(self, values: Mapping[str, Any]) -> tuple[str, list[Span]]:
        self._written, self._marks = [], []
        for piece in self._template.generate(values):
            self._written.append(piece)
        return "".join(self._written), self._marks


def _environment(marked: _Compiled) -> Any:
    """What transformers gives a template: these settings, filters and functions."""
    import jinja2
    from jinja2 import nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("said"), [], [], body).set_lineno(line)

        def said(self, caller: Any) -> str:
            text: str = caller()
            marked.mark(text)
            return text

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def to_json(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        return json.dumps(
            value, ensure_ascii=ensure_ascii, indent=indent, separators=separators,
            sort_keys=sort_keys,
        )  # fmt: skip

    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    made.filters["tojson"] = to_json
    made.globals["raise_exception"] = raise_exception
    made.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return made


def template_of(directory: str | None, tokenizer: Tokenizer, chatml: bool) -> Template | None:
    """The template in a tokenizer's directory (None: bytes, which have none), or ChatML where it is
    asked for; None where there is none. OutsizeError for one that cannot be read."""
    folder = None if directory is None else Path(directory).expanduser()
    special = {} if folder is None else _special(folder)
    text = CHATML if chatml else None if folder is None else _stored(folder)
    if text is None:
        return None
    made = Template("ChatML" if chatml else str(directory), text, special, tokenizer.special)
    _ = made._compiled  # refuse one that cannot be read before any data is
    return made


def _stored(folder: Path) -> str | None:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    found = settings_in(folder / "tokenizer_config.json").get("chat_template")
    if isinstance(found, list):  # several by name
        named = {one.get("name"): one.get("template") for one in found if isinstance(one, dict)}
        found = named.get("default")
    return found if isinstance(found, str) else None


def _special(folder: Path) -> dict[str, str]:
    """`bos_token` and its like, by name."""
    files = ("special_tokens_map.json", "tokenizer_config.json")
    said = {k: v for file in files for k, v in settings_in(folder / file).items()}
    found = {}
    for name in (f"{one}_token" for one in _NAMES):
        token = said.get(name)
        text = token.get("content") if isinstance(token, dict) else token
        if isinstance(text, str):
            found[name] = text
    return found
