"""Where bytes rest: chunks of flat buffers, and the ledger that counts them."""

from outsize.memory.allocator import AllocatorLedger, meter
from outsize.memory.chunk import Chunk, ChunkTable, Slot, tables
from outsize.memory.ledger import KINDS, Ledger, Meter, OverBudget
from outsize.memory.sizes import format_bytes, parse_bytes

__all__ = [
    "KINDS",
    "AllocatorLedger",
    "Chunk",
    "ChunkTable",
    "Ledger",
    "Meter",
    "OverBudget",
    "Slot",
    "format_bytes",
    "meter",
    "parse_bytes",
    "tables",
]
