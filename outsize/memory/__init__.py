"""Where bytes rest: chunks of flat buffers, and the ledger that counts them."""

from typing import TYPE_CHECKING

from outsize.lazy import importing

if TYPE_CHECKING:
    from outsize.memory.allocator import AllocatorLedger, Meter, meter
    from outsize.memory.chunk import Chunk, ChunkTable, Slot, tables
    from outsize.memory.ledger import KINDS, Ledger, OverBudget
    from outsize.memory.sizes import format_bytes, parse_bytes

__getattr__ = importing(__name__)
