"""Data: documents from files, tokenised once, packed into rows, in an order that depends on
(seed, sample) only.

    data = open_data(DataConfig(path="stdlib"))
    stream = TrainStream(data.train, seed=0, rows=8, sequence=512)
    batch = stream.batch(step)
"""

from typing import TYPE_CHECKING

from outsize.lazy import importing

if TYPE_CHECKING:
    from outsize.data.batch import IGNORE, Batch
    from outsize.data.dataset import Dataset
    from outsize.data.files import check_paths
    from outsize.data.open import Data, DataConfig, open_data
    from outsize.data.source import SOURCES, Document, Given, Source, SourceKind, detected, sourced
    from outsize.data.stream import Cursor, TrainStream, ValidationStream
    from outsize.data.tokenizer import (
        ByteTokenizer,
        FileTokenizer,
        Tokenizer,
        check_vocabulary,
        open_tokenizer,
    )

__getattr__ = importing(__name__)
