"""Which rows of every parameter lie on which worker of the tensor axis."""

from __future__ import annotations

from outsize.errors import OutsizeError
from outsize.models.config import DecoderConfig
from outsize.models.cuts import Cut
from outsize.models.declared import Lies, Unit
from outsize.models.decoder import Decoder
from outsize.parallel.shards import even
from outsize.parallel.tensor.declared import is_of_first, layouts
from outsize.parallel.tensor.rewired import over_axis


def counts(config: DecoderConfig) -> dict[Unit, int]:
    """How many a decoder has of each unit that is never cut apart; of those that it has."""
    facts = config.experts
    experts = any(layer.experts for layer in config.layers)
    found: dict[Unit, int] = {
        "heads": config.heads,
        "kv_heads": config.heads if config.latent else config.kv_heads,
        "vocab": config.vocab,
    }
    if not all(layer.experts for layer in config.layers):
        found["inner"] = config.mlp_hidden
    if experts and facts is not None:
        found["expert_inner"] = facts.hidden
        if facts.shared_hidden:
            found["shared_inner"] = facts.shared_hidden
    wiring = over_axis(config)
    return found if wiring is None else {**found, **wiring.units()}


_NAMES: dict[Unit, str] = {
    "heads": "attention heads",
    "kv_heads": "key-value heads",
    "inner": "inner features of the feed-forward network",
    "expert_inner": "inner features of an expert",
    "shared_inner": "inner features of the shared expert",
    "vocab": "tokens of the vocabulary",
    "ways": "ways of a layer",
}


def _fault(unit: Unit, count: int, size: int) -> str | None:
    """Why an axis cannot cut `count` of a unit."""
    match unit:
        case "heads" | "ways" if count % size:
            return "do not divide evenly"
        case "kv_heads" if count % size and size % count:
            return "neither divide evenly nor are shared evenly"
        case _ if unit != "kv_heads" and count < size:
            return "are too few"
    return None


def check(config: DecoderConfig, size: int) -> None:
    """OutsizeError where an axis of `size` workers cannot cut a decoder, with the nearest size that
    can."""
    for unit, count in counts(config).items():
        if fault := _fault(unit, count, size):
            raise OutsizeError(
                f"mesh: tensor is {size}, but the model's {count} {_NAMES[unit]} {fault} over"
                f" {size} workers; the nearest that works is tensor={nearest_size(config, size)}"
            )


def nearest_size(config: DecoderConfig, size: int) -> int:
    """The axis size nearest to `size` that can cut a decoder: the smaller one of two."""
    having = counts(config)
    works = [
        n for n in range(1, config.heads + 1) if not any(_fault(u, c, n) for u, c in having.items())
    ]
    return min(works, key=lambda n: (abs(n - size), n))


def cuts_of(
    model: Decoder, size: int, rank: int, sequence_parallel: bool, by_rows: int = 0
) -> dict[str, Cut]:
    """How each parameter of a whole decoder lies on worker `rank` of `size`, by name. by_rows:
    blocks at the front that are whole everywhere, each worker having the gradient of its rows."""
    having, lies = counts(model.config), layouts(model)
    by_rows = by_rows if size > 1 else 0
    return {
        name: Cut(tuple(p.shape), shared=size, partial=True)
        if is_of_first(name, by_rows)
        else _cut(name, lies[name], tuple(p.shape), having, (size, rank), sequence_parallel)
        for name, p in model.named_parameters()
    }


def _cut(
    name: str,
    entry: Lies,
    shape: tuple[int, ...],
    having: dict[Unit, int],
    place: tuple[int, int],
    sequence_parallel: bool,
) -> Cut:
    size, rank = place
    partial = entry.gradient == "partial" or (entry.gradient == "stream" and sequence_parallel)
    if size == 1:
        return Cut(shape)
    if entry.dim is None or entry.unit is None:
        return Cut(shape, shared=size, partial=partial)
    count = having[entry.unit]
    shared = max(1, size // count)  # workers that hold the same unit, where there are too few
    offsets = even(0, count, size // shared)
    many, held = entry.groups
    width = shape[entry.dim] // held * many
    ends = [divmod(offsets[rank // shared + i] * width, count) for i in (0, 1)]
    if any(rest for _, rest in ends):
        raise OutsizeError(
            f"mesh: tensor is {size}, but {name} has {width} blocks for the model's {count}"
            f" {_NAMES[entry.unit]}, which end elsewhere than the workers' parts; expected smaller"
            " blocks, or another size of the axis"
        )
    first, last = (end for end, _ in ends)
    if first % many or last % many:
        raise OutsizeError(
            f"mesh: tensor is {size}, which cuts {name} at input {first if first % many else last},"
            f" and groups of {many} weights are never cut; choose weights with smaller groups"
            " (FORMAT:16), or another tensor"
        )
    first, last = (at // many * held for at in (first, last))
    return Cut(shape, entry.dim, ((first, last),), shared, partial or shared > 1)
