"""What a decoder is, as data: the architectural facts that a Hugging Face config.json states.

A family (outsize/models/families) turns a config.json into one of these; the decoder is built
from nothing else. Dropout and other training noise (layer drop, router jitter) are off in Outsize
and have no field here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from outsize.models.coding import Coding
from outsize.models.wiring import Instead, Wiring

if TYPE_CHECKING:
    from outsize.models.adapter import Adapter

RopeKind = Literal["default", "linear", "dynamic", "yarn", "longrope", "llama3"]
Placement = Literal["before", "after_branch", "around_branch", "after_sum"]
SIDE = "side network"  # the kind of a layer that is an adapter's, behind all others


@dataclass(frozen=True)
class Rope:
    """A rotary position embedding: how fast each pair of features of a head turns.

    dim: rotated features of a head (the rest passes through); trained: positions the frequencies
    were trained on; amplitude: factor on cosines and sines.
    """

    dim: int
    theta: float
    kind: RopeKind = "default"
    interleaved: bool = False  # pairs are (0,1), (2,3)... rather than (0,d/2), (1,d/2+1)...
    factor: float = 1.0
    trained: int = 0
    amplitude: float = 1.0
    fast: float = 32.0  # yarn: rotations over `trained` above which a feature is left alone
    slow: float = 1.0  # yarn: rotations below which it is fully interpolated
    truncate: bool = True  # yarn: round the two bounds outwards
    low: float = 1.0  # llama3: wavelengths above trained / low are interpolated
    high: float = 4.0  # llama3: wavelengths below trained / high are left alone
    short_factors: tuple[float, ...] = ()  # longrope: divisors for documents up to `trained`
    long_factors: tuple[float, ...] = ()  # longrope: divisors for longer documents


@dataclass(frozen=True)
class NormFacts:
    """unit: the weight that changes nothing, 0 where the norm multiplies by 1 + weight."""

    kind: Literal["rms", "layer"]
    eps: float
    unit: Literal[0, 1] = 1
    affine: bool = True


@dataclass(frozen=True)
class LayerFacts:
    """What may differ from layer to layer; rope names an entry of DecoderConfig.ropes. kind: of the
    mixer (outsize/models/seams.py); mixing: what else one of this kind needs to know, hashable.
    frozen: its parameters that are not trained; idle: nothing up to it is, so that no gradient
    reaches it. beside: where an adapter's targets name some layers alone, those of this one: (part
    of the adapter, what it names in here)."""

    scale: float
    window: int | None = None
    rope: str | None = None
    experts: bool = False
    kind: str = "attention"
    mixing: object = None
    frozen: frozenset[str] = frozenset()
    idle: bool = False
    beside: tuple[tuple[int, str], ...] | None = None


@dataclass(frozen=True)
class LatentFacts:
    """Latent attention (DeepSeek-V2, 2024): queries and keys/values through a low rank."""

    query_rank: int | None
    rank: int
    plain: int  # features of a head without position
    rotary: int  # features of a head with position, the key's shared by all heads
    eps: float = 1e-6


@dataclass(frozen=True)
class ExpertFacts:
    """A mixture of experts in place of the MLP, and how its router chooses."""

    count: int
    chosen: int
    hidden: int
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    normalise: bool = True
    scaling: float = 1.0
    groups: int = 1
    chosen_groups: int = 1
    correction: bool = False  # a bias on the scores that only the choice sees
    shared_hidden: int = 0  # size of the MLP that every token goes through beside its experts


@dataclass(frozen=True)
class Fused:
    """Several native modules that rest in one tensor of the files.

    how: "rows" one after another; "heads" taking turns by head.
    """

    ours: tuple[str, ...]
    theirs: str
    how: Literal["rows", "heads"] = "rows"


@dataclass(frozen=True)
class Names:
    """Module names of a family in Hugging Face files, by native module name.

    `outer` holds those of prologue and epilogue; `block` those inside a block, to be put behind
    `prefix` with {i} the layer; experts carry {e}. `transposed` modules store weights (in, out).
    `base` is a prefix that some files leave out; `aliases` are other full names in old files;
    `ignored` are patterns of stored tensors that are no parameters of the model.
    """

    prefix: str
    outer: Mapping[str, str]
    block: Mapping[str, str]
    fused: tuple[Fused, ...] = ()
    transposed: frozenset[str] = frozenset()
    base: str = ""
    aliases: Mapping[str, str] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()


@dataclass(frozen=True)
class DecoderConfig:
    """Everything the native decoder needs to know. Sizes in elements; see the fields' names."""

    family: str
    vocab: int
    hidden: int
    layers: tuple[LayerFacts, ...]
    heads: int
    kv_heads: int
    head_size: int  # of queries and keys
    value_size: int
    mlp_hidden: int
    activation: str
    norm: NormFacts
    positions: int  # longest document the model was made for
    names: Names = field(compare=False, repr=False)
    source: Mapping[str, Any] = field(compare=False, repr=False)  # config.json as it was read
    ropes: Mapping[str, Rope] = field(default_factory=dict)
    placement: Placement = "before"
    parallel: bool = False  # attention and MLP both read the block's input
    gated: bool = True
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: Literal["none", "head", "whole"] = "none"
    softcap: float | None = None  # on attention scores
    latent: LatentFacts | None = None
    experts: ExpertFacts | None = None
    embed_size: int = 0  # 0: as hidden; else projected in and out
    embed_scale: float = 1.0
    embed_norm: NormFacts | None = None  # right behind the token embedding, which is Xavier's then
    learned_positions: int = 0  # rows of a learned position table; 0: none
    position_offset: int = 0  # row of position 0
    final_norm: bool = True
    tied: bool = False  # the head's weight is the token embedding
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    init_std: float = 0.02
    wiring: Wiring | None = None  # of branches, where they are not one after the other
    weights: Instead | None = None  # what the blocks' Linears hold in the place of weights
    adapter: Adapter | None = None  # what is trained beside the model, which is frozen
    coding: Coding | None = None  # of the blocks' Linears, where they hold no weights
    frozen: frozenset[str] = frozenset()  # parameters outside of blocks that are not trained

    def __post_init__(self) -> None:
        """What is an adapter's, a layer or what is said of one, is there where the adapter is."""
        own = self.layers[:-1] if self.sided else self.layers
        if self.adapter is not None:
            from outsize.models.adapter import Appends
            from outsize.models.targets import by_layer

            if isinstance(self.adapter, Appends):
                own = self.layers if self.sided else (*own, self.adapter.appended)
            own = by_layer(self.adapter, own)
        elif any(layer.beside is not None for layer in own):
            own = tuple(replace(layer, beside=None, idle=False) for layer in own)
        object.__setattr__(self, "layers", own)

    @property
    def sided(self) -> bool:
        """Whether the last layer is an adapter's, which sees what all others took."""
        return bool(self.layers) and self.layers[-1].kind == SIDE

    @property
    def rewired(self) -> str:
        """The key of config.json by which branches are wired otherwise than one after the other,
        "" where none is."""
        return "" if self.wiring is None else self.wiring.key

    @property
    def rounded(self) -> bool:
        """Whether all rows are rounded to 8 bits before weights multiply them."""
        return self.coding is not None and self.coding.head is not None and self.coding.eights != ""

    @property
    def virtual(self) -> int:
        """Virtual tokens that every document begins with: the adapter's."""
        if self.adapter is None:
            return 0
        from outsize.models.virtual import virtual

        return virtual(self.adapter)

    @property
    def whole_documents(self) -> bool:
        """Whether a block needs all tokens of a document at once, since its adapter does."""
        from outsize.models.adapter import Gathers

        adapter = self.adapter
        return self.sided or (isinstance(adapter, Gathers) and adapter.whole_documents)

    def unwired(self) -> DecoderConfig:
        """The plain model of the same branches."""
        return replace(self, wiring=None)

    def untied(self) -> DecoderConfig:
        """The same model; a head that is its token embedding is one beside that, of its rows."""
        if not self.tied:
            return self
        names, outer = self.names, self.names.outer
        head = f"^{re.escape(outer['epilogue.head'])}\\.weight$"  # a second copy
        outer = {**outer, "epilogue.head": outer["prologue.tokens"]}
        names = replace(names, outer=outer, ignored=(*names.ignored, head))
        return replace(self, tied=False, names=names)
