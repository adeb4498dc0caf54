"""What a run's values say of how its model is trained, for the run, its forecast and `verify`."""

from __future__ import annotations

from collections.abc import Mapping

from outsize.data import Data, DataConfig, TrainStream, sourced
from outsize.errors import OutsizeError
from outsize.kernels.entropy import LossOptions
from outsize.models.config import DecoderConfig
from outsize.models.dropout import Noise
from outsize.models.virtual import virtual
from outsize.optim import Optimizer
from outsize.plan import Plan
from outsize.registry import TECHNIQUES
from outsize.runtime.method import method_of
from outsize.runtime.recipe import Rated, Recipe
from outsize.train.config import RunConfig
from outsize.train.resolve import optimizer_of


def recipe_of(config: RunConfig) -> Recipe:
    """How a run trains whose learning rate is known. OutsizeError for what changes the maths, is
    set and is not named."""
    names, said = config.plan.approximate, config.techniques
    for key in said:
        if key not in names and TECHNIQUES.get(key).method:
            raise OutsizeError(
                f"{key} is set, and plan.approximate is {list(names)}: it changes the maths; name"
                f" {key} there, or leave its settings out"
            )
    seed, rates = config.train.seed, rates_of(config)
    recipe = Recipe(optimizer_of(config), config.train.clip, None, None, said, seed, rates)
    return method_of(names).recipe(recipe)


def rates_of(config: RunConfig) -> dict[str, float]:
    """Factors on the learning rate that a run's techniques say, by patterns of parameters."""
    rated = (one for one in config.techniques.values() if isinstance(one, Rated))
    return {pattern: factor for one in rated for pattern, factor in one.rates.items()}


def check_taken(config: DecoderConfig, optimizer: Optimizer) -> None:
    """Refuse an optimizer that leaves all that is trained to its `rest`."""
    if optimizer.rest is None:
        return
    from outsize.models.trained import trained

    found = {n: tuple(p.shape) for n, p in trained(config) if n.startswith("blocks.")}
    if not any(map(optimizer.takes, found.values())):
        shapes = ", ".join(" x ".join(map(str, one)) for one in sorted({*found.values()})) or "none"
        raise OutsizeError(
            f"the optimizer {type(optimizer).__name__} takes none of what the blocks train"
            f" ({shapes}): {type(optimizer.rest).__name__} would update it all; expected other"
            " settings of it (outsize keys), more that is trained, or another optimizer"
        )


def options_of(config: RunConfig) -> LossOptions:
    """What changes the cross-entropy in training."""
    return LossOptions(config.train.label_smoothing, config.train.z_loss)


def noise_of(config: RunConfig, step: int, first: int = 0) -> Noise | None:
    """The dropout of a step's batch. first: as Noise has it."""
    keys = config.train
    return Noise(keys.dropout, keys.seed, step, first) if keys.dropout else None


def stream_of(config: RunConfig, data: Data, plan: Plan) -> TrainStream:
    """The batches of a run, in the order that its seed gives."""
    keys = config.train
    assert keys.sequence is not None
    return TrainStream(data.train, keys.seed, plan.rows, keys.sequence, virtual_of(config))


def virtual_of(config: RunConfig) -> int:
    """Virtual tokens that a run's adapter puts before every document."""
    return max((virtual(one) for one in config.techniques.values()), default=0)


def data_config(config: RunConfig, tokenizer: str) -> DataConfig:
    """tokenizer: a directory, or bytes. The row length of the run is settled."""
    own, held = config.data, config.technique("data.evaluation")
    return DataConfig(
        path=own.path,
        kind=own.kind,
        field=own.field,
        tokenizer=tokenizer,
        validation=own.validation,
        cache=own.cache,
        source=sourced(config.techniques),
        sequence=config.train.sequence and max(1, config.train.sequence - virtual_of(config)),
        evaluation=() if held is None else held.paths,
    )


def files_of(config: RunConfig) -> Mapping[str, str]:
    """By name, the files that a model trained on a run's data has beside its tokenizer's."""
    found = sourced(config.techniques)
    return {} if found is None else found[0].files(found[1])


def weighed(config: RunConfig) -> bool:
    """Whether targets have weights of their own."""
    found = sourced(config.techniques)
    return found is not None and found[0].weighed
