"""Hardware as YAML or JSON: written by field name, read back checked type by type."""

from __future__ import annotations

from pathlib import Path

from outsize import typed
from outsize.hardware.hardware import Hardware
from outsize.texts import read_text


def dumps(hardware: Hardware) -> str:
    """YAML text; equal hardware gives equal text."""
    said = typed.plain(hardware, defaults=False)
    return typed.dump_yaml(said, allow_unicode=True, width=100)


def loads(text: str, name: str = "hardware") -> Hardware:
    """Hardware from YAML or JSON text (JSON is YAML). Raises OutsizeError naming the field."""
    built: Hardware = typed.read(Hardware, typed.load_yaml(text, name), name)
    return built


def read(path: str | Path) -> Hardware:
    """Hardware from a file. Raises OutsizeError when it is missing or damaged."""
    return loads(read_text(path, "name a YAML file of hardware"), str(path))
