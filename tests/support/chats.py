"""Chats, tokenizers with chat templates, and what transformers says of both."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer as Inner
from tokenizers import decoders, models, pre_tokenizers, trainers

MARKED = "{% generation %}", "{% endgeneration %}"
PLAIN = "", ""

TEMPLATES = {
    "chatml": (
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' }}"
        "{% if m['role'] == 'assistant' %}(({{ m['content'] + '<|im_end|>' }}))"
        "{% else %}{{ m['content'] + '<|im_end|>' }}{% endif %}{{ '\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    ),
    "llama-3": (
        "{{ bos_token }}\n{%- for m in messages %}\n"
        "    {{- '<|head|>' + m.role + '<|over|>\\n\\n' }}\n"
        "    {%- if m.role == 'assistant' %}\n"
        "        (({{- m.content | trim + '<|im_end|>' }}))\n"
        "    {%- else %}\n        {{- m.content | trim + '<|im_end|>' }}\n    {%- endif %}\n"
        "{%- endfor %}\n"
        "{%- if add_generation_prompt %}\n    {{- '<|head|>assistant<|over|>\\n\\n' }}\n"
        "{%- endif %}"
    ),
    "llama-2": (
        "{% if messages[0]['role'] == 'system' %}{% set rest = messages[1:] %}"
        "{% set system = messages[0]['content'] + '\\n\\n' %}{% else %}{% set rest = messages %}"
        "{% set system = '' %}{% endif %}{% for m in rest %}{% if m['role'] == 'user' %}"
        "{{ bos_token + '[INST] ' + (system if loop.first else '') + m['content'] + ' [/INST]' }}"
        "{% elif m['role'] == 'assistant' %}(({{ ' ' + m['content'] + eos_token }}))"
        "{% else %}{{ raise_exception('roles must alternate') }}{% endif %}{% endfor %}"
    ),
}
CHATS = [
    [("user", "the cat?"), ("assistant", "sat on the mat")],
    [("system", "be brief"), ("user", "naïve café"), ("assistant", "€5 \U0001f600"),
     ("user", "  two  spaces\n"), ("assistant", "def main():\n    return 1\n")],
    [("user", "日本語 <b>&amp;</b>"), ("assistant", "a"), ("user", "b"), ("assistant", "c d e")],
]  # fmt: skip
SPECIAL = ["<|begin|>", "<|im_start|>", "<|im_end|>", "<|head|>", "<|over|>"]


def messages(chat):
    return [{"role": role, "content": content} for role, content in chat]


def template(name: str, marks: tuple[str, str] = MARKED) -> str:
    return TEMPLATES[name].replace("((", marks[0]).replace("))", marks[1])


def tokenizer(directory: Path, text: str | None, as_file: bool = False) -> Path:
    """A byte-level tokenizer with special tokens and a chat template."""
    inner = Inner(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    corpus = [content for chat in CHATS for _, content in chat] * 20
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    inner.train_from_iterator(
        corpus,
        trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, special_tokens=SPECIAL),
    )
    directory.mkdir(parents=True, exist_ok=True)
    inner.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|begin|>", "eos_token": "<|im_end|>",
    }  # fmt: skip
    if as_file and text is not None:
        (directory / "chat_template.jinja").write_text(text, encoding="utf-8")
    elif text is not None:
        settings["chat_template"] = text
    (directory / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return directory


def foreign(directory: Path, chat, text: str | None = None):
    """Ids, the assistant's mask, of transformers."""
    from transformers import PreTrainedTokenizerFast

    found = PreTrainedTokenizerFast.from_pretrained(str(directory)).apply_chat_template(
        messages(chat), chat_template=text, tokenize=True, return_dict=True,
        return_assistant_tokens_mask=True,
    )  # fmt: skip
    return found["input_ids"], found["assistant_masks"]


def jsonl(path: Path, records) -> Path:
    path.write_text("".join(json.dumps(one) + "\n" for one in records), encoding="utf-8")
    return path
