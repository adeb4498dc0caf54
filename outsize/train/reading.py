"""What data a run reads, as its keys say."""

from __future__ import annotations

from outsize.data import DataConfig, sourced
from outsize.train.config import RunConfig


def data_config(config: RunConfig, tokenizer: str) -> DataConfig:
    """tokenizer: a directory, or bytes. The row length of the run is settled."""
    own = config.data
    return DataConfig(
        path=own.path,
        kind=own.kind,
        field=own.field,
        tokenizer=tokenizer,
        validation=own.validation,
        cache=own.cache,
        source=sourced(config.techniques),
        sequence=config.train.sequence,
    )


def weighed(config: RunConfig) -> bool:
    """Whether targets have weights of their own."""
    found = sourced(config.techniques)
    return found is not None and found[0].weighed
