"""Jinja in a sandbox, as transformers sets it up, with a limit of what a rendering may take.

A template is somebody else's program. In the sandbox it can change nothing it was given and reach
no attribute that begins with an underscore. Each rendering has an allowance, the same on any
machine: passes of loops, calls of macros, and characters that operators, filters and methods make
are paid from it. What would make much at once (a factor, a width, a power) is refused before it is
made.
"""

from __future__ import annotations

import functools
import json
import re
import threading
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

ALLOWANCE = 2**27  # characters of one rendering
STEP = 256  # of them for a pass of a loop, beside the text that stands in it
_ELEMENT = 32  # of them for an element of a list
_WIDEST = 10**6  # of a field, an indent, a batch
_DIGITS = re.compile(r"\d{7}")  # of a width in a format
_BITS = 2**12  # of a whole number
# Filters whose settings say how much they make, and those that look at elements, not into them.
_COSTLY = ("center", "indent", "wordwrap", "batch", "slice", "truncate", "tojson", "format",
           "replace", "join")  # fmt: skip
_SHALLOW = ("length", "count", "first", "last", "list", "map", "select", "selectattr", "reject",
            "rejectattr", "default", "d", "items", "reverse", "sort", "unique", "random", "sum",
            "min", "max", "attr", "batch", "slice", "groupby", "dictsort", "join")  # fmt: skip

Span = tuple[int, int]  # characters [start, stop)


class Rendering:
    """A template that was compiled, and the rendering of it that runs: what it has taken, and where
    its `generation` blocks came to lie."""

    def __init__(self, text: str) -> None:
        """jinja2.TemplateError for a text that is no template."""
        self._left, self._lock = ALLOWANCE, threading.Lock()
        environment = _Environment(self)
        tree = environment.parse(text)
        bodies: list[Any] = list(tree.find_all((nodes.For, nodes.Macro, nodes.CallBlock)))
        for one in bodies:
            one.body.insert(0, _paid_first(one))
        code = environment.compile(_joined(tree))
        made = environment.template_class
        self._template = made.from_code(environment, code, environment.make_globals(None))
        self._written: list[str] = []
        self._marks: list[Span] = []

    def render(self, values: Mapping[str, Any]) -> tuple[str, list[Span]]:
        """The text, and the marked parts of it, for one thread after another."""
        with self._lock:
            self._written, self._marks, self._left = [], [], ALLOWANCE
            for piece in self._template.generate(values):
                self._written.append(piece)
            return "".join(self._written), self._marks

    def spend(self, cost: int) -> None:
        """jinja2.TemplateError where the allowance is used up."""
        self._left -= cost
        if self._left < 0:
            raise jinja2.TemplateError(
                "it does not end, or makes more text than a chat template needs"
                f" ({ALLOWANCE:,} characters, or {ALLOWANCE // STEP:,} passes of loops)"
            )

    def mark(self, said: str) -> None:
        """A block that is written next."""
        start = sum(map(len, self._written))
        self._marks.append((start, start + len(said)))

    def paid(self, value: Any) -> Any:
        """A value that is paid for: a text's characters, the elements of what has some."""
        if isinstance(value, str):
            self.spend(len(value))
        elif isinstance(value, list | tuple | Mapping):
            self.spend(_ELEMENT * len(value))
        return value

    def written(self, value: Any) -> Any:
        """A value that will be written out, paid for with all that is in it."""
        waiting = [value]
        while waiting:
            one = self.paid(waiting.pop())
            if isinstance(one, Mapping):
                waiting += [*one.keys(), *one.values()]
            elif isinstance(one, list | tuple):
                waiting += one
        return value


def _paid_first(body: Any) -> nodes.Node:
    """The statement that pays for a pass of a body, and for the text in it."""
    cost = STEP + sum(len(one.data) for one in body.find_all(nodes.TemplateData))
    cost += sum(len(str(one.value)) for one in body.find_all(nodes.Const))
    tick = nodes.ExtensionAttribute(_Blocks.identifier, "tick")
    called = nodes.Call(tick, [nodes.Const(cost)], [], None, None)
    return nodes.ExprStmt(called).set_lineno(body.lineno)


def _joined(tree: nodes.Template) -> nodes.Template:
    """With each `a ~ b` a call, so that it is paid for."""

    def changed(value: Any) -> Any:
        if isinstance(value, list):
            return [changed(one) for one in value]
        if not isinstance(value, nodes.Node):
            return value
        for name, inner in value.iter_fields():
            setattr(value, name, changed(inner))
        if not isinstance(value, nodes.Concat):
            return value
        called = nodes.ExtensionAttribute(_Blocks.identifier, "join")
        return nodes.Call(called, value.nodes, [], None, None).set_lineno(value.lineno)

    made: nodes.Template = changed(tree)
    made.set_environment(tree.environment)  # type: ignore[arg-type]
    return made


class _Blocks(Extension):
    """`generation` blocks, and what is put into the code of a template."""

    tags = {"generation"}  # noqa: RUF012
    environment: _Environment

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("said"), [], [], body).set_lineno(line)

    def said(self, caller: Any) -> str:
        text: str = caller()
        self.environment.rendering.mark(text)
        return text

    def tick(self, cost: int) -> None:
        self.environment.rendering.spend(cost)

    def join(self, *values: Any) -> str:
        return "".join(str(self.environment.rendering.written(one)) for one in values)


class _Environment(ImmutableSandboxedEnvironment):
    """What transformers gives a template: these settings, filters and functions."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, rendering: Rendering) -> None:
        self.rendering = rendering
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Blocks, loopcontrols],
            finalize=rendering.written,
        )  # fmt: skip
        self.filters["tojson"] = _to_json
        for name, function in list(self.filters.items()):
            self.filters[name] = self._priced(name, function)
        self.globals.pop("lipsum", None)
        self.globals["raise_exception"] = _raise
        self.globals["strftime_now"] = lambda form: datetime.now().strftime(form)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        spend = self.rendering.spend
        if isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * (right if operator == "**" else 1) + right.bit_length()
            _refuse(bits > _BITS, f"a number of {bits} bits")
        elif operator == "*":
            count, many = (left, right) if isinstance(left, int) else (right, left)
            if isinstance(count, int) and isinstance(many, str | list | tuple):
                spend(max(count, 0) * len(many))
        elif operator == "%" and isinstance(left, str):
            self._formats(left, right if isinstance(right, tuple) else (right,))
        return self.rendering.paid(super().call_binop(context, operator, left, right))

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        """A call of a template: methods of texts and lists are paid for like filters."""
        method = getattr(__obj, "__wrapped__", __obj)
        owner, name = getattr(method, "__self__", None), getattr(method, "__name__", "")
        if not isinstance(owner, str | list | dict):
            return super().call(__context, __obj, *args, **kwargs)
        __self._price(name, owner, (*args, *kwargs.values()))
        return __self.rendering.paid(super().call(__context, __obj, *args, **kwargs))

    def _price(self, name: str, owner: Any, args: tuple[Any, ...]) -> None:
        """Pay for what a method or a filter is about to make of `owner`."""
        pay = self.rendering.paid if name in _SHALLOW else self.rendering.written
        for one in (owner, *args):
            pay(one)
        for one in args:
            wide = isinstance(one, int) and abs(one) > _WIDEST
            _refuse(wide, f"{one} of something")
        if name in ("format", "format_map") and isinstance(owner, str):
            self._formats(owner, args)
        elif name == "replace" and len(args) > 1:
            self.rendering.spend((str(owner).count(str(args[0])) + 1) * len(str(args[1])))
        elif name == "join" and args:  # "x".join(list), or the filter: list | join("x")
            between, parts = (owner, args[0]) if isinstance(owner, str) else (args[0], owner)
            if isinstance(parts, list | tuple):
                self.rendering.written(parts)
                self.rendering.spend(len(str(between)) * len(parts))

    def _formats(self, text: str, values: tuple[Any, ...]) -> None:
        _refuse(_DIGITS.search(text) is not None, "a field of millions of characters")
        for one in values:
            self.rendering.written(one)
        fields = text.count("{") + text.count("%")
        self.rendering.spend(fields * max((len(str(one)) for one in values), default=0))

    def _priced(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """A filter that is paid for."""
        first = 1 if hasattr(function, "jinja_pass_arg") else 0

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            given = (*args[first + 1 :], *kwargs.values()) if name in _COSTLY else ()
            self._price(name, args[first], given)
            return self.rendering.paid(function(*args, **kwargs))

        return call


def _refuse(wrong: bool, what: str) -> None:
    if wrong:
        raise jinja2.TemplateError(f"it asks for {what}")


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(
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
