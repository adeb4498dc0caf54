"""Which values the code between an adopted module's blocks reads: found once, on shapes alone.

The module's forward runs with every parameter and every block's output absent
(outsize/runtime/adopted/absent.py); what arrives at a block says what it came from. So a worker of
a pipeline knows which earlier outputs are still needed behind a block (the block's own, a skip
connection, an encoder's output), and which parameters outside the blocks are needed where.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from outsize import accelerator
from outsize.errors import OutsizeError
from outsize.runtime.adopted.absent import (
    Absent,
    Origin,
    Source,
    absent_like,
    buffers_instead,
    form_of,
    instead,
    parameters_instead,
)
from outsize.runtime.again import Call
from outsize.runtime.trees import unflatten
from outsize.torch_private import (
    DispatchMode,
    disable_current_modes,
    tree_leaves,
    tree_map,
)

_PLAIN = (bool, int, float, str, bytes, torch.dtype, torch.device, type(None))
DRAW = -1
UNSEEN = "and other workers of the pipeline would not see it"


@dataclass(frozen=True)
class Reach:
    """By segment (0, the blocks' from 1 on, the epilogue's). inputs: what its block, or the loss,
    depends on through the code around the blocks; read: names of the parameters that the code
    before it reads."""

    inputs: tuple[frozenset[Source], ...]
    read: tuple[frozenset[str], ...]

    def crossing(self, segment: int) -> tuple[Source, ...]:
        """Outputs of blocks up to this segment that something behind it depends on, in order."""
        later = frozenset[Source]().union(*self.inputs[segment + 1 :])
        return tuple(sorted(s for s in later if 1 <= s.segment <= segment))

    def users(self, source: Source) -> list[int]:
        """Segments whose inputs depend on a source."""
        return [i for i, sources in enumerate(self.inputs) if source in sources]

    def parameters(self, segment: int) -> frozenset[str]:
        """Names of those outside the block that a segment's computation and gradients need."""
        return self.read[segment] | {s.name for s in self.inputs[segment] if s.segment == 0}


class Uncut(OutsizeError):
    """Blocks are not called once each, in order, so that the module cannot be cut between them."""


def check_order(index: int, expected: int, paths: Sequence[str]) -> None:
    """Refuse a block that is called again or too early."""
    if index == expected:
        return
    name = paths[index]
    if index < expected:
        raise Uncut(
            f"block {name!r} is called again after {paths[expected - 1]!r}; a block must be"
            " called once, in order: name other blocks by a path pattern"
        )
    raise Uncut(
        f"block {name!r} is called where {paths[expected]!r} was expected: blocks must be"
        " called in the order of the module tree; name them in order by path patterns"
    )


def check_kinds(call: Call, path: str, why: str, remedy: str = "") -> None:
    """Refuse a block's call that receives something that may change while it runs. why: what that
    would do; remedy: beside passing none."""
    for value in call.rest:
        if not isinstance(value, _PLAIN):
            raise OutsizeError(
                f"block {path!r} receives a {type(value).__name__}, which may change while it"
                f" runs, {why}; pass none (use_cache=False){remedy}"
            )


class Outline:
    """The form of what a block gives: everything but the values of tensors."""

    def __init__(self, call: Call, outs: Sequence[Tensor]) -> None:
        self._call = call
        call.tensors = []
        self.outs = [(form_of(out), out.device) for out in outs]

    def absent(self, segment: int, path: str) -> list[Tensor]:
        """Stand-ins of all outputs."""
        return [
            Absent(form, device, Origin([Source(segment, i, path)]))
            for i, (form, device) in enumerate(self.outs)
        ]

    def result(self, tensors: list[Tensor]) -> Any:
        """What the block gives, with these tensors."""
        return self._call.result(tensors)


class Outlines:
    """The outlines of blocks that run elsewhere, found once for each form of their inputs."""

    def __init__(self, blocks: Sequence[tuple[str, nn.Module]]) -> None:
        self._blocks = list(blocks)
        self._known: dict[Any, Outline] = {}

    def of(self, index: int, call: Call) -> Outline:
        """What a block gives for a call."""
        path, block = self._blocks[index]
        check_kinds(call, path, UNSEEN)
        forms = tuple((t.shape, t.dtype, t.device) for t in call.tensors)
        key = (index, block.training, str(call.spec), forms, tuple(call.rest))
        if key not in self._known:
            self._known[key] = _outline(Source(index + 1, 0, path), block, call)
        return self._known[key]


def _outline(source: Source, block: nn.Module, call: Call) -> Outline:
    """Run a block on shapes alone, or on zeros where it asks for values. Masks and ids keep their
    values; what it draws is undone, buffers stay as they are."""
    try:
        with _Fresh(source):
            return _tried(block, call, lambda x: absent_like(x, [source]))
    except OutsizeError:
        pass
    try:
        with disable_current_modes():
            return _tried(block, call, lambda x: x.new_zeros(()).expand(x.shape))
    except (RuntimeError, ValueError, IndexError) as error:
        raise OutsizeError(
            f"block {source.name!r} cannot run on shapes or zeros alone, as the workers of a"
            f" pipeline do with the blocks of others ({str(error).splitlines()[0]}); put all"
            " workers on the data axis"
        ) from None


def _tried(block: nn.Module, call: Call, of: Callable[[Tensor], Tensor]) -> Outline:
    """What a block gives with other numbers in its inputs and parameters."""
    twin = Call(call.forward, *_rebuilt(call, lambda t: of(t) if t.is_floating_point() else t))
    places = [*parameters_instead(block, of), *buffers_instead(block)]
    with instead(places), torch.no_grad(), _undrawn(block):
        return Outline(twin, twin.run(twin.tensors))


def _rebuilt(call: Call, of: Callable[[Tensor], Tensor]) -> tuple[Any, Any]:
    """The arguments of a call with other tensors."""
    leaves = list(call.rest)
    for place, tensor in zip(call.places, call.tensors, strict=True):
        leaves[place] = of(tensor)
    args, kwargs = unflatten(leaves, call.spec)
    return args, kwargs


def _undrawn(model: nn.Module) -> Any:
    """Random numbers as if none had been drawn inside."""
    return accelerator.undrawn(model.parameters())


class _Fresh(DispatchMode):
    """Makes new numbers absent too: blocks fill in place what they have made."""

    def __init__(self, source: Source) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._source = source

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return tree_map(self._absent, func(*args, **(kwargs or {})))

    def _absent(self, out: Any) -> Any:
        known = not isinstance(out, Tensor) or isinstance(out, Absent)
        return out if known or not out.is_floating_point() else absent_like(out, [self._source])


class _Draws(DispatchMode):
    """Marks what is drawn at random. Single numbers, on which code may decide, stay numbers."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count, self.before = 0, ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return out
        source = Source(DRAW, self.count, self.before)
        self.count += 1
        return tree_map(partial(_drawn, source), out)


def _drawn(source: Source, out: Any) -> Any:
    if isinstance(out, Absent):
        out.origin.sources.add(source)
    elif isinstance(out, Tensor) and out.dim():
        return absent_like(out, [source])
    return out


class Tracer:
    """Answers the calls of blocks with absent outputs and notes what they are given."""

    def __init__(
        self, outlines: Outlines, paths: Sequence[str], origins: dict[str, Origin]
    ) -> None:
        import greenlet

        self.glue = greenlet.getcurrent()
        self._outlines, self._paths, self._origins = outlines, paths, origins
        self.draws = _Draws()
        self.inputs: list[frozenset[Source]] = [frozenset()]
        self.read: list[frozenset[str]] = [frozenset()]
        self._expect()

    def _expect(self) -> None:
        place = len(self.inputs) - 1
        self.draws.before = self._paths[place] if place < len(self._paths) else "the end"

    def enter(self, index: int, plain: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """A block's call; gives its outputs."""
        check_order(index, len(self.inputs) - 1, self._paths)
        call = Call(plain, args, kwargs)
        self.note(call.tensors)
        outline = self._outlines.of(index, call)
        return outline.result(outline.absent(index + 1, self._paths[index]))

    def note(self, tensors: Iterable[Any]) -> None:
        """What arrives at the next segment, and which parameters were looked at before it."""
        found = (t.origin.sources for t in tensors if isinstance(t, Absent))
        self.inputs.append(frozenset[Source]().union(*found))
        self.read.append(frozenset(n for n, origin in self._origins.items() if origin.read))
        for origin in self._origins.values():
            origin.read = False
        self._expect()


def find_reach(
    model: nn.Module,
    blocks: Sequence[tuple[str, nn.Module]],
    outlines: Outlines,
    run: Callable[[Tracer], Any],
) -> Reach:
    """Run a module on shapes. run: calls it and its loss, its blocks' calls given to the tracer."""
    named = list(model.named_parameters())
    unknown = {id(p): absent_like(p, [Source(0, 0, name)]) for name, p in named}
    origins = {name: unknown[id(p)].origin for name, p in named}
    tracer = Tracer(outlines, [path for path, _ in blocks], origins)
    places = parameters_instead(model, lambda p: unknown[id(p)])
    with (
        instead([*places, *buffers_instead(model)]), _undrawn(model), torch.no_grad(), tracer.draws
    ):  # fmt: skip
        loss = run(tracer)
    if len(tracer.inputs) <= len(blocks):
        path = blocks[len(tracer.inputs) - 1][0]
        raise OutsizeError(f"block {path!r} is not called by the module's forward; leave it out")
    tracer.note(tree_leaves(loss))
    return Reach(tuple(tracer.inputs), tuple(tracer.read))
