"""A conversation with a model: its template writes it out, what ends an answer ends the text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import Tensor

from outsize.data.chats import Asked, Message
from outsize.data.targets import placed
from outsize.data.template import END, Template
from outsize.data.tokenizer import Tokenizer
from outsize.decode.samplers import Sampler
from outsize.decode.text import check_prompt
from outsize.errors import OutsizeError
from outsize.serve.calls import QUESTION, SAID, WHERE, CallForm, form_of
from outsize.serve.model import Model, ends_of


@dataclass
class Talk:
    """messages: so far, as OpenAI has them."""

    model: Model
    text: Tokenizer
    template: Template
    messages: list[Message] = field(default_factory=list)

    def prompt(self, messages: Sequence[Message], tools: Sequence[Any] | None = None) -> list[int]:
        """The token ids that ask for an answer. OutsizeError for what the template refuses."""
        written, _ = self.template.render(WHERE, messages, tools, True)
        check_prompt(written)
        if END in written:
            return [int(token) for token in placed(self.text, written).ids]
        ids: list[int] = self.text.encode_many([written])[0].tolist()  # Python is let go meanwhile
        return ids

    @cached_property
    def calls(self) -> CallForm:
        """How tools are called. OutsizeError where the template has no place for them."""
        return form_of(self.template)

    @cached_property
    def ends(self) -> frozenset[int]:
        """The tokens that end an answer: those that end a text, and the special one that the
        template writes behind an answer, where it writes a plain one."""
        own = ends_of(self.model, self.text)
        said = [QUESTION, {"role": "assistant", "content": SAID}]
        try:
            written, _ = self.template.render(WHERE, said, None, False)
        except OutsizeError:  # it wants a system's message, or something else
            return own
        behind = written[written.rfind(SAID) + len(SAID) :].lstrip()
        found = [one for one in self.template.ends if one and behind.startswith(one)]
        if found:
            ids = placed(self.text, max(found, key=len)).ids
            own |= {int(ids[0])} if len(ids) == 1 else set()
        return own

    def answer(
        self,
        asked: Asked,
        max_tokens: int,
        sampling: Sampler,
        stop: Sequence[str] = (),
        on_text: Callable[[str], None] | None = None,
        on_ready: Callable[[str], None] | None = None,
    ) -> str:
        """What the model says to messages. stop: texts before which that ends."""
        ids = self.prompt(asked.messages, asked.tools)
        said = self.model.generate(
            ids, max_tokens, sampling, stop, self.text, on_text, on_ready, self.ends
        )
        assert isinstance(said, str)
        return said

    def say(
        self,
        words: str,
        max_tokens: int,
        sampling: Sampler,
        on_text: Callable[[str], None] | None = None,
        broken: Callable[[], bool] = lambda: False,
    ) -> bool:
        """Go on with the user's words, and keep them with the answer; where it fails nothing is
        kept. Gives whether the model's context ended it. broken: asked before each token whether
        that is to be the end. OutsizeError where the context has no room for an answer."""
        asked = [*self.messages, {"role": "user", "content": words}]
        config = self.model.config
        used = config.virtual + len(self.prompt(asked))
        if (room := config.positions - used) < 1:
            raise OutsizeError(
                f"the conversation has {used} tokens, and the model's context is"
                f" {config.positions}; begin anew, or say less"
            )
        drawn = list[int]()

        def draw(logits_V: Tensor, index: int) -> int:
            drawn.append(self.text.eos if broken() else sampling(logits_V, index))
            return drawn[-1]

        said = self.answer(Asked(asked), min(max_tokens, room), draw, (), on_text)
        self.messages = [*asked, {"role": "assistant", "content": said}]
        return len(drawn) == room < max_tokens and drawn[-1] not in self.ends
