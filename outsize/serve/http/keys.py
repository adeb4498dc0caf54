"""Who may ask, and how much: the keys of a file, and what each may have in a minute.

A limit is a bucket that holds what a minute allows and fills as time goes (a token bucket). Tokens
of a prompt are asked for before it is begun, those that are drawn are taken as they come: who has
had more waits until it is made up for.
"""

from __future__ import annotations

import stat
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outsize.errors import OutsizeError, counted
from outsize.serve.asks import Full
from outsize.texts import read_text

ALLOWED = "outsize.allowed"  # of a scope: the Allowance of who asks
_MINUTE = 60.0
_LIMITS = ("requests", "tokens")


@dataclass(frozen=True)
class Key:
    """secret: what stands behind "Bearer"; requests, tokens: in a minute, None: no limit."""

    secret: str
    requests: int | None = None
    tokens: int | None = None


def keys_in(path: Path) -> tuple[Key, ...]:
    """Of a file, a line each: a key, and behind it what it may have in a minute, as requests=60
    tokens=20000. OutsizeError for a file that others can read, without a key, and for a line that
    is none."""
    if not path.is_file():
        raise OutsizeError(f"--key-file {path} is no file; expected keys, a line each")
    if path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise OutsizeError(f"--key-file {path} can be read by others; chmod 600 {path}")
    lines = [(n, line.split()) for n, line in enumerate(read_text(path).splitlines(), 1)]
    keys = tuple(_key(f"--key-file {path}: line {n}", words) for n, words in lines if words)
    if not keys or not all(key.secret.isascii() for key in keys):
        raise OutsizeError(f"--key-file {path}; expected keys in ASCII, a line each")
    if len({key.secret for key in keys}) < len(keys):
        raise OutsizeError(f"--key-file {path} has a key twice; expected each once")
    return keys


def _key(where: str, words: list[str]) -> Key:
    found = dict[str, int]()
    for word in words[1:]:
        name, _, value = word.partition("=")
        if name not in _LIMITS or name in found or not value.isdecimal() or not int(value):
            raise OutsizeError(
                f"{where}: {word!r} behind the key; expected what it may have in a minute, as"
                " requests=60 or tokens=20000, each once"
            )
        found[name] = int(value)
    return Key(words[0], **found)


class _Bucket:
    """most: that it holds, in proportion to which it fills; None: there is no bottom."""

    def __init__(self, name: str, most: int | None, clock: Callable[[], float]) -> None:
        self._name, self._most, self._clock = name, most, clock
        self._left, self._at = float(most or 0), clock()

    def ask(self, wanted: int) -> None:
        """Full where there is not as much; of more than it ever holds all that it holds is."""
        if self._most is None:
            return
        now = self._clock()
        self._left += self._most * (now - self._at) / _MINUTE
        self._left, self._at = min(self._left, self._most), now
        lacking = min(wanted, self._most) - self._left
        if lacking > 0:
            most = counted(self._most, self._name.removesuffix("s"), ",")
            raise Full(
                f"this key has had its {most} of a minute; ask again later",
                lacking * _MINUTE / self._most,
            )

    def take(self, count: int) -> None:
        self._left -= count


class Allowance:
    """What a key may still have."""

    def __init__(self, key: Key, clock: Callable[[], float] = time.monotonic) -> None:
        self.key = key
        self._requests = _Bucket("requests", key.requests, clock)
        self._tokens = _Bucket("tokens", key.tokens, clock)

    def ask(self) -> None:
        """One more request. Full where it has had its requests."""
        self._requests.ask(1)
        self._requests.take(1)

    def begin(self, tokens: int) -> None:
        """A prompt of so many tokens is taken up. Full where it has had its tokens."""
        self._tokens.ask(tokens)
        self._tokens.take(tokens)

    def drew(self, tokens: int) -> None:
        self._tokens.take(tokens)


_ANYBODY = Allowance(Key(""))


def allowance(scope: Mapping[str, Any]) -> Allowance:
    """Of who asks; of a server without keys anybody's."""
    found: Allowance = scope.get(ALLOWED, _ANYBODY)
    return found
