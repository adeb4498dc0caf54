"""How publications count the operations of a step, so that an achieved rate becomes seconds.

Each is a function of a shape, the tokens of a step and a sequence's length. L layers, H hidden
size, s sequence, V vocabulary, N parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType

from outsize.foresight.shape import Shape

Count = Callable[[Shape, float, int, bool], float]


def palm(shape: Shape, tokens: float, sequence: int, again: bool) -> float:
    """6 N + 12 L H s a token, all of N, no mask (Chowdhery et al., PaLM, 2022)."""
    n = shape.parameters - _idle(shape)
    return tokens * (6 * n + 3 * shape.scores(sequence))


def megatron_2021(shape: Shape, tokens: float, sequence: int, again: bool) -> float:
    """96 B s L H^2 (1 + s / 6 H + V / 16 L H), of which computing again is a quarter (Narayanan et
    al., 2021); for these shapes, with MLPs of 4 H."""
    layers = 24 * shape.layers * shape.hidden**2 + 4 * shape.layers * shape.hidden * sequence
    return tokens * ((4 if again else 3) * layers + 6 * shape.hidden * shape.vocab)


def megatron_2021_again(shape: Shape, tokens: float, sequence: int, again: bool) -> float:
    """The same with what is computed again, whatever the figure is called (MT-NLG, 2022)."""
    return megatron_2021(shape, tokens, sequence, True)


def megatron_core(shape: Shape, tokens: float, sequence: int, again: bool) -> float:
    """Products of layers and output, scores without a mask, forward and back (Megatron-LM's
    num_floating_point_operations until 2024)."""
    return 3 * tokens * (_layers(shape) + shape.scores(sequence))


def causal(shape: Shape, tokens: float, sequence: int, again: bool) -> float:
    """The same with half of the scores (Megatron-LM since 2024)."""
    if shape.pattern:
        return 3 * tokens * _mixed(shape, sequence)
    return 3 * tokens * (_layers(shape) + shape.scores(sequence) / 2)


def megatron_layers(shape: Shape, tokens: float, sequence: int, again: bool) -> float:
    """96 B s L H^2: matrices of layers alone, counted as in 2021 otherwise (the older figures of
    BigScience's chronicles)."""
    return tokens * (4 if again else 3) * 24 * shape.layers * shape.hidden**2


def ungated(shape: Shape, tokens: float, sequence: int, again: bool) -> float:
    """As causal, with two matrices in an MLP that has three and nothing saved by windows
    (Megatron-Bridge until May 2026, where a gate's activation is not SiLU)."""
    return causal(replace(shape, gated=False, window=0), tokens, sequence, again)


def frozen(shape: Shape, tokens: float, sequence: int, again: bool) -> float:
    """Weights that stay as they are have no gradient of their own; scores of SQuAD's documents,
    hundreds of tokens each in a row, are next to nothing (Megatron-Bridge, of adapters)."""
    return tokens * 2 * _layers(shape)


def parameters(shape: Shape, tokens: float, sequence: int, again: bool) -> float:
    """8 N a token (BigScience's experiments with V100)."""
    return tokens * 8 * shape.parameters


COUNTS: Mapping[str, Count] = MappingProxyType({
    "palm": palm,
    "megatron-2021": megatron_2021,
    "megatron-2021-again": megatron_2021_again,
    "megatron-core": megatron_core,
    "megatron-layers": megatron_layers,
    "causal": causal,
    "ungated": ungated,
    "frozen": frozen,
    "parameters": parameters,
})  # fmt: skip


def _layers(shape: Shape) -> float:
    """Operations of a token in products of layers and of the output, forward."""
    heads = 1 + shape.predicted
    more = shape.parts.further / shape.layers * shape.working
    return 2.0 * (shape.working + more + heads * shape.of_vocabulary)


def _mixed(shape: Shape, sequence: int) -> float:
    """Operations of a token, forward, where layers have one part each (Megatron-Bridge's
    hybrid_flops): routers left out, and recurrent states of values that are 2 H wide whatever their
    heads are; further layers are attention and experts."""
    h, r = shape.hidden, shape.recurrent
    scan = 0.0
    if r is not None:
        wide = 2 * h * (3 * 2 * h + 2 * r.groups * r.state + r.heads)
        scan = wide + 7.0 * 2 * h * r.state
    attention = 2.0 * shape.of_attention + shape.scores(sequence) / 2 / max(
        1, shape.parts.attending
    )
    routed = shape.active * shape.of_expert + shape.of_shared - h * shape.experts
    found = shape.parts.recurring * scan + shape.parts.plain * 2.0 * shape.of_dense
    found += (shape.parts.attending + shape.predicted) * attention
    found += (shape.parts.routed + shape.predicted) * 2.0 * routed
    return found + 2.0 * (1 + shape.predicted) * shape.of_vocabulary


def _idle(shape: Shape) -> int:
    """Parameters of experts that a token does not meet."""
    return shape.parts.routed * (shape.experts - shape.active) * shape.of_expert
