"""Which directory a model lies in: itself, or the last checkpoint of a run."""

from __future__ import annotations

import os
from pathlib import Path

from outsize.checkpoint.adapters import ADAPTER_CONFIG
from outsize.checkpoint.manifest import MANIFEST_NAME
from outsize.errors import OutsizeError


def model_directory(path: str | Path) -> Path:
    """The Hugging Face directory at `path`, or in the latest checkpoint of the run at `path`.

    A checkpoint is verified, every byte of it. OutsizeError for what is neither, or damaged.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise OutsizeError(f"directory is {path!r}; expected the path of a run or a model")
    directory = Path(path).expanduser()
    if not directory.is_dir():
        raise OutsizeError(
            f"{directory} is not a directory; expected a run, a checkpoint or a Hugging Face model"
        )
    if (directory / MANIFEST_NAME).is_file():
        from outsize.checkpoint.opened import open_contents

        open_contents(directory).verify()
        return directory
    if any((directory / name).is_file() for name in ("config.json", ADAPTER_CONFIG)):
        return directory
    from outsize.checkpoint.store import Store

    store = Store(directory)
    if store.latest() is None:
        raise OutsizeError(
            f"{directory} holds no model: neither a config.json nor a checkpoint; expected a run, a"
            " checkpoint or a Hugging Face model"
        )
    checkpoint = store.load()
    checkpoint.verify()
    return checkpoint.path
