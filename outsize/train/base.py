"""An adapter's frozen weights that stay in files: their model's own, or codes made of them once.

Where a run asks for a format that the files do not have, codes are made before its first step and
kept in its directory, so that it goes on with them:

    runs/mine/base/    the base as `outsize convert --weights` writes it, and made_of.json
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from outsize import accelerator
from outsize.checkpoint.files import read_json
from outsize.checkpoint.hub import Described, describe, supposed, whole_directory, write_as
from outsize.checkpoint.writing import write_json
from outsize.errors import OutsizeError
from outsize.memory import format_bytes
from outsize.models.coding import as_stored
from outsize.models.config import DecoderConfig
from outsize.plan import FILES
from outsize.runtime.storage.base_files import BaseFiles, lying
from outsize.train.model import Subject

KEPT, MADE = "base", "made_of.json"


@dataclass(frozen=True)
class Base:
    """Where frozen weights of a run stay. output: the run's directory."""

    subject: Subject
    output: str | Path | None

    @property
    def made(self) -> bool:
        """Whether its codes are made for the run."""
        return _makes(self.subject.config)

    def said(self, below: Mapping[str, int]) -> list[str]:
        """A line on them, where there are some. below: bytes by tier."""
        size = below.get(FILES, 0)
        if not size:
            return []
        where = f"the files of {self.subject.directory}"
        if self.made:
            kept = "the run's directory" if self.output is None else str(self._kept)
            where = f"{kept}, made of {where} once"
        return [f"base: {format_bytes(size)} stay in {where}, read there in every step"]

    @property
    def _kept(self) -> Path:
        assert self.output is not None, "the run has a directory"
        return Path(self.output) / KEPT

    def make(self, below: Mapping[str, int], tell: Callable[[str], Any]) -> None:
        """Make codes where some are to stay in the run's directory and are not there; `tell` is
        told. One stored tensor is in memory at a time. OutsizeError where they cannot be."""
        config, directory = self.subject.config, self.subject.directory
        if not self.made or not below.get(FILES):
            return
        assert directory is not None and config.coding is not None, "an adapter's base has one"
        mark = {"weights": config.coding.name, "fingerprint": self.subject.base}
        kept = self._kept
        if (kept / MADE).is_file() and read_json(kept / MADE) == mark:
            return
        shutil.rmtree(kept, ignore_errors=True)
        tell(f"base: {mark['weights']} is made of {directory} and kept in {kept}")
        found = describe(directory, replace(config, adapter=None))

        def write(into: Path) -> None:
            write_as(found, into)
            write_json(into / MADE, mark)

        whole_directory(kept, write)

    @contextmanager
    def opened(
        self, below: Mapping[str, int], device: torch.device
    ) -> Iterator[dict[str, BaseFiles]]:
        """The store that reads them, where there are some. OutsizeError where files have changed or
        are damaged."""
        if not below.get(FILES):
            yield {}
            return
        with closing(BaseFiles(self._described, accelerator.queues(device))) as files:
            if not self.made and files.fingerprint != self.subject.base:
                raise OutsizeError(
                    f"{files.directory} has changed while the run began; begin it anew"
                )
            yield {FILES: files}

    @property
    def _described(self) -> Described:
        config, directory = self.subject.config, self.subject.directory
        assert directory is not None, "an adapter's base has one"
        return describe(self._kept, as_stored(config)) if self.made else describe(directory, config)


def _makes(config: DecoderConfig) -> bool:
    return config.coding is not None and not config.coding.stored


def may_lie(found: Described) -> dict[str, torch.dtype]:
    """The parameters of an adapter's base that can stay in files, with their types there."""
    config, own = found.model.config, lying(found)
    if not _makes(config):
        return own
    made = lying(supposed(as_stored(config)))
    return own | {name: dtype for name, dtype in made.items() if dtype == torch.uint8}
