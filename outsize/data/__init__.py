"""Data: documents from files, tokenised once, packed into rows, in an order that depends on
(seed, sample) only.

    data = open_data(DataConfig(path="stdlib"))
    stream = TrainStream(data.train, seed=0, rows=8, sequence=512)
    batch = stream.batch(step)
"""

from outsize.data.batch import IGNORE, Batch
from outsize.data.dataset import Dataset, dataset_of
from outsize.data.open import BackgroundData, Data, DataConfig, open_data
from outsize.data.sources import Skip, SkipReport
from outsize.data.stream import Cursor, Prefetch, TrainStream, ValidationStream
from outsize.data.tokenizer import (
    ByteTokenizer,
    FileTokenizer,
    TextStream,
    Tokenizer,
    check_vocabulary,
    open_tokenizer,
)

__all__ = [
    "IGNORE",
    "BackgroundData",
    "Batch",
    "ByteTokenizer",
    "Cursor",
    "Data",
    "DataConfig",
    "Dataset",
    "FileTokenizer",
    "Prefetch",
    "Skip",
    "SkipReport",
    "TextStream",
    "Tokenizer",
    "TrainStream",
    "ValidationStream",
    "check_vocabulary",
    "dataset_of",
    "open_data",
    "open_tokenizer",
]
