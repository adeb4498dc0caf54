"""The checker on a native decoder and its table of layouts (outsize/parallel/tensor/declared.py).

One layer of each kind is traced and checked, however many there are of it; kinds follow one another
as the layers do, so that what one gives is what the next takes, in both directions. Layers that
share rows see those of one worker alone: what else they are told lies as their tokens do, and what
looks at whole documents has them.

T tokens, D hidden.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from outsize.models.adapter import Squares
from outsize.models.config import DecoderConfig
from outsize.models.cuts import Cut
from outsize.models.decoder import Decoder
from outsize.models.experts import LocalDispatch
from outsize.models.linear import Linear
from outsize.models.norm import Norm
from outsize.models.seams import AttendSpec, Beginning, Context, Recurrence, StateSpec, Tensors
from outsize.parallel.check.checker import (
    Checked,
    Declaration,
    Finding,
    Known,
    examined,
)
from outsize.parallel.check.cuts import counted, layout_of
from outsize.parallel.check.graph import Graph, Site
from outsize.parallel.check.infer import Found
from outsize.parallel.check.trace import Recorder, trace
from outsize.parallel.layouts import REPLICATED, Exchange, Laid, Layout, Sharded
from outsize.parallel.tensor import declared as tables

FEATURES = Sharded(1)
TOKENS = 8  # of the traced microbatch: two documents of four


@dataclass(frozen=True)
class Spread:
    """A decoder on the tensor axis: layouts of its parameters (cuts of any one worker, by name),
    where layouts change, and how the logits lie that the loss takes. by_rows: blocks at the front
    that share rows."""

    cuts: Mapping[str, Cut]
    boundaries: tuple[tables.Boundary, ...]
    logits: Layout = FEATURES
    axis: str = "tensor"
    by_rows: int = 0


def check_decoder(config: DecoderConfig, size: int, spread: Spread) -> tuple[Finding, ...]:
    """Everything that is wrong with a decoder that lies like this on `size` workers; empty where
    its gradients, its loss and its norm are those of one worker."""
    firsts = _firsts(config, spread)
    layers = tuple(config.layers[i] for i in firsts)
    with torch.device("meta"):
        model = Decoder(replace(config, layers=layers))
    sharing = sum(i < spread.by_rows for i in firsts)
    declared = _declaration(model, size, spread, firsts)
    graph = _traced(model, frozenset(declared.known), sharing)
    checked = examined(graph, declared)
    found = (*checked.findings, *_streams(graph, declared, checked, sharing))
    names = {f"blocks.{j}": f"blocks.{i}" for j, i in enumerate(firsts)}
    renamed = (replace(f, module=_renamed(f.module, names)) for f in found)
    return (*renamed, *counted(spread.cuts, spread.axis, size))


def _firsts(config: DecoderConfig, spread: Spread) -> list[int]:
    """The first layer of each kind: alike in what they are, how they are cut and where layouts
    change."""
    cuts: dict[str, list[tuple[str, Cut]]] = {}
    for name, cut in spread.cuts.items():
        head, index, *rest = name.split(".")
        if head == "blocks":
            cuts.setdefault(index, []).append(
                (".".join(rest), replace(cut, spans=((0, cut.size),)))
            )
    particular = [b.module for b in spread.boundaries if b.module.startswith("blocks.")]
    kinds: dict[object, int] = {}
    for i, facts in enumerate(config.layers):
        own = tuple(m for m in particular if not m.startswith("blocks.*") and _is_of(m, i))
        kinds.setdefault((replace(facts, scale=1.0), tuple(cuts.get(str(i), ())), own), i)
    return list(kinds.values())


def _is_of(pattern: str, layer: int) -> bool:
    return fnmatchcase(f"blocks.{layer}", ".".join(pattern.split(".")[:2]))


def _renamed(name: str, names: Mapping[str, str]) -> str:
    block = ".".join(name.split(".")[:2])
    return names.get(block, block) + name[len(block) :]


def _declaration(model: Decoder, size: int, spread: Spread, firsts: Sequence[int]) -> Declaration:
    names = {f"blocks.{j}": f"blocks.{i}" for j, i in enumerate(firsts)}
    sharing = sum(i < spread.by_rows for i in firsts)
    cuts = {name: spread.cuts[_renamed(name, names)] for name, _ in model.named_parameters()}
    exchanges = dict(_exchanges(model, spread.boundaries, names))
    return Declaration(
        spread.axis,
        size,
        {name: layout_of(cut) for name, cut in cuts.items()},
        frozenset(name for name, cut in cuts.items() if cut.partial),
        exchanges,
        (),
        (Laid(spread.logits, spread.logits),),
        {n: k for n, k in _wide_norms(model, cuts) if not tables.is_of_first(n, sharing)},
    )


def _exchanges(
    model: Decoder, boundaries: Sequence[tables.Boundary], names: Mapping[str, str]
) -> Iterator[tuple[Site, Exchange]]:
    """Boundaries by place. The loss takes the head's logits as they are made."""
    modules = dict(model.named_modules())
    for boundary in boundaries:
        if boundary.before == boundary.after or boundary.module == "epilogue.head":
            continue
        exchange = Exchange(boundary.before, boundary.after)
        for name in modules:
            if boundary.of(_renamed(name, names)):
                yield from ((site, exchange) for site in _sites(modules[name], name, boundary.edge))


def _sites(module: nn.Module, name: str, edge: str) -> Iterator[Site]:
    """Biases of row weights come behind the sum: it is of the product, or of what has its place."""
    for child, part in module.named_children():
        if edge == "output" and isinstance(part, Linear) and part.use == "row":
            beside = part.beside is not None
            yield (f"{name}.{child}.beside", "output") if beside else (f"{name}.{child}", "product")
            return
    yield name, edge


def _wide_norms(model: Decoder, cuts: Mapping[str, Cut]) -> Iterator[tuple[str, Known]]:
    """Norms that are cut, over all heads at once or of weights' rows, and take their statistic over
    the axis."""
    for name, module in model.named_modules():
        if isinstance(module, Squares) and module.cut:
            yield name, Known(Sharded(1), REPLICATED)
        if isinstance(module, Norm) and module.wide and module.lies.unit is not None:
            cut = cuts[f"{name}.weight"]
            if cut.dim is not None:
                layout = Sharded(1, copies=cut.shared)
                yield name, Known(layout, layout)


BY_ROWS = "_by_rows"  # behind the name of an operator that looks at whole documents, which it has


class _Noted(Beginning):
    """A recurrence as one node. sharing: layers at the front that share rows."""

    def __init__(self, recorder: Recorder, sharing: int) -> None:
        self._recorder, self._sharing = recorder, sharing

    def run(
        self,
        layer: int,
        states: tuple[StateSpec, ...],
        recurrence: Recurrence,
        inputs: Tensors,
        bounds: tuple[int, ...],
    ) -> Tensor:
        def play(*given: Tensor) -> Tensor:
            return recurrence.whole(given, bounds, None)[0]

        return self._recorder.whole(_called("recurrence", layer, self._sharing), play, *inputs)


def _called(op: str, layer: int, sharing: int) -> str:
    return op + BY_ROWS * (layer < sharing)


def _told(_: nn.Module, args: tuple[Tensor, Context]) -> tuple[Tensor, Context]:
    """Tables of the tokens that are here, which lie as those do."""
    x_TD, ctx = args
    rope = {n: (torch.empty_like(a), torch.empty_like(b)) for n, (a, b) in ctx.rope.items()}
    return x_TD, replace(ctx, rope=rope)


def _traced(model: Decoder, known: frozenset[str], sharing: int) -> Graph:
    """From ids to logits, attention and recurrences as one node each."""
    for block in model.blocks[:sharing]:
        block.register_forward_pre_hook(_told)
    ids_T = torch.empty(TOKENS, dtype=torch.int64, device="meta")
    bounds = (0, TOKENS // 2, TOKENS)
    rope = {
        name: (torch.empty(TOKENS, facts.dim // 2, device="meta"),) * 2
        for name, facts in model.config.ropes.items()
    }

    def call(recorder: Recorder) -> Tensor:
        def attend(
            q_THK: Tensor,
            k_TGK: Tensor,
            v_TGW: Tensor,
            bounds: tuple[int, ...],
            spec: AttendSpec,
        ) -> Tensor:
            def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
                return q.new_empty((*q.shape[:2], v.shape[2]))

            op = _called("attend", spec.layer, sharing)
            return recorder.whole(op, run, q_THK, k_TGK, v_TGW)

        carry = _Noted(recorder, sharing)
        with recorder.sleeping():
            positions_T = torch.empty_like(ids_T)
            context = Context(positions_T, bounds, rope, attend, LocalDispatch(), carry)
        h_TD = model.hidden(ids_T, context)
        return model.epilogue.logits(h_TD)

    return trace(model, (ids_T,), known=known, call=call)


def _streams(
    graph: Graph, declared: Declaration, checked: Checked, sharing: int
) -> Iterator[Finding]:
    """Every layer takes and gives the residual stream in one layout, so their order is free; those
    that share rows, which are first, in one of their own. The input of a layer before which nothing
    learns has no gradient: it fits any."""
    sites = [(node.site, node.inputs[0]) for node in graph.nodes if node.site is not None]
    layers = [(site, index) for site, index in sites if _is_layer(site[0])]

    def inside(site: Site) -> bool:
        enters = site[1] == "input" and site in declared.exchanges
        return tables.is_of_first(site[0], sharing) and not enters

    for shared in (False, True):
        some = [(site[0], index) for site, index in layers if inside(site) is shared]
        yield from _stream(some, declared, checked)


def _stream(
    layers: Sequence[tuple[str, int]], declared: Declaration, checked: Checked
) -> Iterator[Finding]:
    any_of = next((g for _, i in layers if (g := checked.gradients[i]) is not None), None)
    seen: dict[tuple[Found | None, Layout | None], str] = {}
    for path, index in layers:
        seen.setdefault((checked.values[index], checked.gradients[index] or any_of), path)
    if len(seen) > 1 and not checked.findings:
        (first, _), (other, module), *_ = seen.items()
        what = f"the residual stream is {other[0]} with {other[1]} gradient here, {first[0]} with"
        missing = "an exchange where the layers meet"
        yield Finding(module, "x", declared.axis, f"{what} {first[1]} elsewhere", missing)


def _is_layer(path: str) -> bool:
    return path.startswith("blocks.") and path.count(".") == 1
