"""The callback by which benchmarks/finetune.py sees the steps of `outsize train`."""

from __future__ import annotations

import os
from pathlib import Path

from support.contender_finetune import Found

import outsize
from outsize.techniques.callbacks import Record, Running

FOLDER = "OUTSIZE_BENCHMARK_FOLDER"


class Watch(outsize.Callback):
    def begin(self, run: Running) -> None:
        self.found = Found()

    def step(self, record: Record) -> None:
        self.found.step(float(record["loss"]))

    def end(self, step: int) -> None:
        self.found.write(Path(os.environ[FOLDER]))
