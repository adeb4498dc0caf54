"""The chat template of a tokenizer, rendered as transformers renders it; those that have a name.

Its text is run in a sandbox (outsize/data/sandbox.py). Named templates lie in
outsize/data/templates, in the shape that models of these names are trained on.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outsize.data.chats import Message
from outsize.data.tokenizer import FileTokenizer, Tokenizer, settings_in
from outsize.errors import OutsizeError, nearest
from outsize.texts import read_text

if TYPE_CHECKING:
    from outsize.data.sandbox import Rendering, Span

OWN = "own"
END = "\ufdd0"  # what a template writes for the end of a tokenizer that has no text for it: bytes
NAMED = ("alpaca", "chatml", "gemma", "llama3", "mistral", "plain", "vicuna", "zephyr")
# What ends a turn of those that do not write the tokenizer's own end.
_ENDS = {"chatml": "<|im_end|>", "gemma": "<end_of_turn>", "llama3": "<|eot_id|>"}
_NAMES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
_MARK = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")


@dataclass(frozen=True)
class Template:
    """name: where it was read, for errors. special: what it may call by name (`eos_token`). ends:
    texts that end an answer: special tokens, what the template ends turns with. stops: of these,
    what is one token."""

    name: str
    text: str
    special: Mapping[str, str]
    ends: tuple[str, ...]
    stops: tuple[str, ...] = ()

    @cached_property
    def _compiled(self) -> Rendering:
        import jinja2

        from outsize.data.sandbox import Rendering

        try:
            return Rendering(self.text)
        except (jinja2.TemplateError, RecursionError) as error:
            why = " ".join(str(error).split())[:160]
            raise OutsizeError(f"chat template of {self.name} cannot be read: {why}") from None

    @property
    def marks(self) -> bool:
        """Whether it says itself where the assistant speaks."""
        return _MARK.search(self.text) is not None

    def check(self) -> None:
        """OutsizeError where it is no template."""
        _ = self._compiled

    def render(
        self, where: str, messages: Sequence[Message], tools: Sequence[Any] | None, prompt: bool
    ) -> tuple[str, list[Span]]:
        """Messages written out, and what of it is marked. where: the chat's place, for errors;
        prompt: with what asks for an answer behind it. OutsizeError for a template that fails, and
        for one that would leave calls of tools out."""
        if any(one.get("tool_calls") for one in messages) and "tool_calls" not in self.text:
            raise OutsizeError(
                f"{where}: the assistant calls a tool, and the chat template of {self.name} writes"
                " no calls; set data.chat.template to one that does, as chatml, or leave that"
                " chat out"
            )
        why = ""
        for written in _ways(messages):
            if self._takes_parts:
                written = [_in_parts(one) for one in written]
            try:
                text, marks = self._rendered(written, tools, prompt)
                text.encode()
                return text, marks
            except OutsizeError:
                raise
            except UnicodeEncodeError:  # of a call, a tool, a name: contents are looked at before
                raise OutsizeError(f"{where} holds half a surrogate pair; expected text") from None
            except Exception as error:  # the template's own: whatever it divides, indexes, raises
                why = why or " ".join(str(error).split())[:160]
        raise OutsizeError(f"{where}: the chat template of {self.name} fails: {why}")

    def _rendered(
        self, messages: Sequence[Message], tools: Sequence[Any] | None, prompt: bool
    ) -> tuple[str, list[Span]]:
        values = {
            **self.special, "messages": list(messages), "tools": tools, "documents": None,
            "add_generation_prompt": prompt,
        }  # fmt: skip
        return self._compiled.render(values)

    @cached_property
    def _takes_parts(self) -> bool:
        """Whether it reads contents only as lists of parts, as many models that see pictures have
        them: of a text it writes nothing, or fails."""
        said = [{"role": one, "content": f"{one} said"} for one in ("user", "assistant")]

        def writes(messages: Sequence[Message]) -> bool:
            try:
                text, _ = self._rendered(messages, None, False)
            except Exception:  # the template's own, which a chat meets again
                return False
            return all(one["content"] in text for one in said)

        return not writes(said) and writes([_in_parts(one) for one in said])


def _ways(messages: Sequence[Message]) -> Iterator[Sequence[Message]]:
    """The same chat as templates want it: as it is, with arguments as text, with empty texts beside
    calls, where others have none, and with both."""
    yield messages
    texts = [_with_texts(one) for one in messages]
    if texts != list(messages):
        yield texts
    for one in (messages, texts) if texts != list(messages) else (messages,):
        if any(said.get("content") is None for said in one):
            yield [{**said, "content": said.get("content") or ""} for said in one]


def _in_parts(message: Message) -> Message:
    """A message whose content is a list of one part."""
    content = message.get("content")
    if not isinstance(content, str):
        return message
    return {**message, "content": [{"type": "text", "text": content}]}


def _with_texts(message: Message) -> Message:
    """A message whose calls have their arguments as JSON in a text, which some templates join to
    theirs (DeepSeek's)."""

    def text(call: Mapping[str, Any]) -> Mapping[str, Any]:
        own = call["function"].get("arguments")
        written = own if isinstance(own, str) else json.dumps(own, ensure_ascii=False)
        return {**call, "function": {**call["function"], "arguments": written}}

    calls = message.get("tool_calls")
    return {**message, "tool_calls": [text(one) for one in calls]} if calls else message


def template_of(directory: str | None, tokenizer: Tokenizer, name: str = OWN) -> Template | None:
    """The template in a tokenizer's directory (None: bytes, which have none), or the one of a name
    or file; None where there is none. OutsizeError for one that cannot be read."""
    folder = None if directory is None else Path(directory).expanduser()
    special = {} if folder is None else _special(folder)
    text = (None if folder is None else stored(folder)) if name == OWN else template_text(name)
    if text is None:
        return None
    spoken = tokenizer.text_of(tokenizer.eos) if isinstance(tokenizer, FileTokenizer) else END
    special.setdefault("eos_token", spoken)
    if name != OWN and isinstance(tokenizer, FileTokenizer) and tokenizer.start != tokenizer.eos:
        special.setdefault("bos_token", tokenizer.text_of(tokenizer.start))
    stops = tuple(dict.fromkeys((*tokenizer.special, special["eos_token"])))
    ends = (*stops, _ENDS[name]) if name in _ENDS else stops
    made = Template(str(directory) if name == OWN else name, text, special, ends, stops)
    made.check()  # before any data is read
    return made


def template_text(name: str) -> str:
    """The text of a named template, or of a file. OutsizeError where it is neither."""
    if name in NAMED:
        return (files("outsize.data") / "templates" / f"{name}.jinja").read_text(encoding="utf-8")
    if not Path(name).expanduser().is_file():
        raise OutsizeError(
            f"data.chat.template is {name!r}, neither a file nor one of {', '.join(NAMED)}"
            f"{nearest(name, NAMED)}"
        )
    return read_text(Path(name).expanduser())


def stored(folder: Path) -> str | None:
    """The text of the template in a tokenizer's directory; None where there is none."""
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
