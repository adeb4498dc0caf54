"""Prompts of a file: texts, and what chats ask."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from outsize.data.chats import Asked, asked_of, form_of
from outsize.data.files import find_files
from outsize.data.records import BadRecordError, records
from outsize.decode.text import check_prompt
from outsize.errors import OutsizeError
from outsize.registry import filed
from outsize.texts import read_text

Prompts = list[str | Asked]


def listed(path: Path) -> Prompts:
    """The prompts of a file. OutsizeError, naming the line, for one that is none."""
    (file,) = find_files((str(path),)).files if path.is_file() else (None,)
    if file is None:
        raise OutsizeError(f"--prompts {path} is no file; expected prompts, a line each")
    found: Prompts = []
    if file.kind == "text":
        found += [line for line in read_text(path).splitlines() if line.strip()]
    for where, record in records(file, lambda count: None) if file.kind != "text" else ():
        found.append(_prompt(where, record))
    for one in found:
        if isinstance(one, str):
            check_prompt(one)
    if not found:
        raise OutsizeError(f"--prompts {path} has no prompt in it")
    return found


def _prompt(where: str, record: Any) -> str | Asked:
    own = record if isinstance(record, dict) else {}
    if isinstance(record, BadRecordError):
        raise OutsizeError(f"{where}: {record}; expected a record with a prompt")
    if (form := form_of(own)) is not None:
        return asked_of(where, own, form)
    text = own.get("prompt")
    if isinstance(text, list) and text:
        return asked_of(where, {"messages": text}, "messages")
    if isinstance(text, str) and text:
        return text
    if isinstance(own.get("instruction"), str):
        return asked_of(where, {**own, "output": ""}, "alpaca")
    raise OutsizeError(
        f"{where}: expected a record with a text prompt, or a chat (messages, conversations,"
        " instruction)"
    )


def question(text: str) -> Asked:
    """A text as what a user asks."""
    return Asked([{"role": "user", "content": text}])


def trained_on_chats(directory: Path) -> bool:
    """Whether a checkpoint says that its run read more than texts. Techniques are imported only
    where its keys are those of one."""
    from outsize.checkpoint.opened import read_manifest
    from outsize.data import SOURCES

    found = read_manifest(directory)
    config = {} if found is None else found.meta.get("config")
    said = config if isinstance(config, dict) else {}
    keys = (f"data.{name}" for name in sorted(filed("data")))
    on = (key for key in keys if said.get(key, any(one.startswith(f"{key}.") for one in said)))
    return any(SOURCES.find(key) is not None for key in on)
