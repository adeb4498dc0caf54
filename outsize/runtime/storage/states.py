"""States: the weights and optimizer states of a job by name, for checkpoints and samples.

What lies in parts on several workers is put together when it is asked for, one state of one chunk
at a time: then all of them ask for the same in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from outsize.collectives import Collective
from outsize.memory import ChunkTable
from outsize.memory.chunk import Slot
from outsize.parallel.whole import WholeTensors
from outsize.runtime.storage.weight_pool import WeightPool
from outsize.schedule.chunks import LINE
from outsize.schedule.kept import MASTER, PARAMETERS
from outsize.schedule.staying import stays

Fill = Callable[[str, Tensor], object]


@dataclass(frozen=True)
class States:
    """Those of a weight_pool. owners: the parameters by name. line: the workers of the pipeline."""

    weight_pool: WeightPool
    whole_tensors: WholeTensors
    owners: Mapping[str, nn.Parameter]
    line: Collective

    @property
    def _every(self) -> tuple[ChunkTable, ...]:
        return self.weight_pool.placement.chunks.every

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every parameter by name, in the precision that training continues from.

        Views of the device's buffers; of what rests below or on other workers, of a copy of one
        chunk at a time: use each before the next.
        """
        for table in self._every:
            yield from self._named(table, self._master(table), "")

    def optimizer_state(self) -> Iterator[tuple[str, Tensor]]:
        """Optimizer states by "parameter.state", as `weights` gives weights."""
        for table in self._every:
            for what in self.weight_pool.placement.chunks.kept.names(table):
                yield from self._named(table, what, f".{what}")

    def _named(self, table: ChunkTable, what: str, suffix: str) -> Iterator[tuple[str, Tensor]]:
        flat = self._read(table, what)
        for slot in table.slots:
            yield f"{slot.name}{suffix}", self._whole(table, slot, what, flat)

    def _whole(self, table: ChunkTable, slot: Slot, what: str, flat: Tensor) -> Tensor:
        """The whole of a parameter's state, of a whole state of its chunk: in the parameter's shape
        where it has one element for each, else 1-D."""
        spec = self.weight_pool.placement.chunks.kept.spec(table, what)
        mine = table.part(slot, flat, spec)
        return self.whole_tensors.whole(slot.name, mine) if spec.shaped else mine

    def _read(self, table: ChunkTable, what: str) -> Tensor:
        """A whole state of a chunk, of this worker or of the first that has it."""
        placement = self.weight_pool.placement
        if self.line.size == 1 or table.on(LINE):  # rows of others come with `whole`
            return self.weight_pool.read(placement.chunks.tables.index(table), what)
        first = placement.chunks.holders(table)[0]
        if placement.chunks.turn == first:
            flat = self.weight_pool.read(placement.chunks.tables.index(table), what)
        else:  # not into a copy that this worker has: reading mends nothing
            dtype = dict(placement.chunks.kept.states(table))[what]
            numel = table.before(table.numel, placement.chunks.kept.spec(table, what))
            flat = torch.empty(numel, dtype=dtype, device=self.weight_pool.device)
        return self.line.broadcast(flat, first)

    def state_names(self) -> Iterator[str]:
        """The names that `optimizer_state` gives."""
        for table in self._every:
            for what in self.weight_pool.placement.chunks.kept.names(table):
                yield from (f"{slot.name}.{what}" for slot in table.slots)

    @property
    def weights_dtype(self) -> torch.dtype:
        """What training continues from is held in."""
        dtypes = self.weight_pool.placement.chunks.kept.dtypes
        return dtypes.parameters if dtypes.master is None else dtypes.master

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a parameter, of which a part may lie here."""
        return self.whole_tensors.shape(name, self.owners[name])

    def weight_reader(self) -> Callable[[str], Tensor]:
        """Gives a weight by name. What rests below is read chunk by chunk: asked for in the order
        of the model, each is read once; a tensor stays good."""
        read = self.reader()
        return lambda name: read(name, None)

    def reader(self) -> Callable[[str, str | None], Tensor]:
        """Gives the named optimizer state of a parameter, or (None) its weight, as `weight_reader`
        does: it holds one state of one chunk."""
        where = {slot.name: (table, slot) for table in self._every for slot in table.slots}
        last: dict[tuple[ChunkTable, str], Tensor] = {}

        def read(name: str, state: str | None) -> Tensor:
            table, _ = where[name]
            key = (table, state or self._master(table))
            if key not in last:
                last.clear()
                last[key] = self._read(*key)
            return self._whole(*where[name], key[1], last[key])

        return read

    def form(self, name: str, state: str) -> tuple[tuple[int, ...], torch.dtype]:
        """The shape and dtype of a parameter's optimizer state."""
        placement = self.weight_pool.placement
        table = next(t for t in self._every if any(slot.name == name for slot in t.slots))
        spec, shape = placement.chunks.kept.spec(table, state), self.shape(name)
        dtype = spec.dtype or placement.chunks.kept.dtypes.optimizer
        return (shape if spec.shaped else (spec.elements(shape),)), dtype

    def load(self, value: Fill | None, state: Fill) -> None:
        """Replace every weight (value None: they stay) but those that stay in files, and every
        optimizer state, one at a time.

        value(parameter name, out) writes a weight into a tensor, state("parameter.state", out) a
        state.
        """
        for index in range(len(self.weight_pool.chunks)):
            if value is not None and not stays(self.weight_pool.placement.chunks, index):
                value_here = self.whole_tensors.cutting(value)
                self.replace(index, tuple(self.weights_of(index)), "", value_here)
            chunks = self.weight_pool.placement.chunks
            table = chunks.tables[index]
            for what in chunks.kept.names(table):
                shaped = chunks.kept.spec(table, what).shaped
                state_here = self.whole_tensors.cutting(state, f".{what}") if shaped else state
                self.replace(index, (what,), f".{what}", state_here)

    def weights_of(self, index: int) -> Iterator[str]:
        """The states of a chunk that hold its weights."""
        held = dict(self.weight_pool.placement.chunks.held(index))
        return (w for w in (MASTER, PARAMETERS) if w in held)

    def replace(self, index: int, whats: tuple[str, ...], suffix: str, fill: Fill) -> None:
        """Fill the first of these states of a chunk anew; the others are the same, rounded."""
        flats = self.weight_pool.staged(index, whats)
        first, *others = flats.values()
        table = self.weight_pool.chunks[index].table
        spec = self.weight_pool.placement.chunks.kept.spec(table, whats[0])
        with torch.no_grad():
            for slot in table.slots:
                fill(f"{slot.name}{suffix}", table.part(slot, first, spec))
            for flat in others:
                flat.copy_(first)
        for what, flat in flats.items():
            self.weight_pool.write(index, what, flat)

    def adopt(self, fill: Fill | None) -> None:
        """Make the chunks, and move the parameters' values into them, one by one; the parameters
        become views. fill: writes them, where they have no memory of their own."""
        weight_pool, views = self.weight_pool, dict[str, Tensor]()

        def take(name: str, out: Tensor) -> None:
            parameter = self.owners[name]
            if fill is None:
                out.copy_(parameter)
            else:
                self.whole_tensors.cutting(fill)(name, out)
            parameter.data = views[name]  # what it held before goes now

        for index in range(len(weight_pool.placement.chunks.tables)):
            chunk = weight_pool.make(index)
            views |= {slot.name: slot.of(chunk.parameters) for slot in chunk.table.slots}
            if stays(weight_pool.placement.chunks, index):
                for slot in chunk.table.slots:
                    self.owners[slot.name].data = views[slot.name]
            else:
                self.replace(index, tuple(self.weights_of(index)), "", take)
        nothing: dict[torch.dtype, Tensor] = {}
        for name, parameter in self.owners.items():
            if name not in views:  # of a stage on other workers: its shape is all that stays
                if parameter.dtype not in nothing:
                    whole = parameter.dtype == torch.uint8  # codes: all bits of their scales
                    poison = 255 if whole else float("nan")
                    nothing[parameter.dtype] = parameter.data.new_full((), poison)
                parameter.data = nothing[parameter.dtype].expand(parameter.shape)

    def _master(self, table: ChunkTable) -> str:
        held = dict(self.weight_pool.placement.chunks.kept.states(table))
        return MASTER if MASTER in held else PARAMETERS

    def update_counts(self) -> dict[str, int]:
        """Updates that each parameter has had, of all workers of a pipeline."""
        mine = {name: n for chunk in self.weight_pool.chunks for name, n in chunk.steps.items()}
        if self.line.size == 1:
            return mine
        names = [slot.name for table in self._every for slot in table.slots]
        counts = torch.tensor([mine.get(name, 0) for name in names], dtype=torch.float64)
        largest = self.line.all_reduce(counts, "max").tolist()
        return {name: int(n) for name, n in zip(names, largest, strict=True) if n}

    def restore_counts(self, counts: Mapping[str, int]) -> None:
        """Set the updates that each parameter has had; the weights were loaded before."""
        for chunk in self.weight_pool.chunks:
            chunk.steps = {s.name: counts[s.name] for s in chunk.table.slots if s.name in counts}


class Stateful:
    """What a job gives of its states, whatever else it does."""

    @property
    def states(self) -> States | Stateful:
        """Them."""
        raise NotImplementedError

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every parameter by name, in the precision that training continues from.

        Views of the device's buffers; of what rests below, of a copy of one chunk at a time: use
        each before the next.
        """
        return self.states.weights()

    def optimizer_state(self) -> Iterator[tuple[str, Tensor]]:
        """Optimizer states by "parameter.state", as `weights` gives weights."""
        return self.states.optimizer_state()

    def state_names(self) -> Iterator[str]:
        """The names that `optimizer_state` gives."""
        return self.states.state_names()

    @property
    def weights_dtype(self) -> torch.dtype:
        """What training continues from is held in."""
        return self.states.weights_dtype

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a parameter, of which a part may lie here."""
        return self.states.shape(name)

    def form(self, name: str, state: str) -> tuple[tuple[int, ...], torch.dtype]:
        """The shape and dtype of a parameter's optimizer state."""
        return self.states.form(name, state)

    def weight_reader(self) -> Callable[[str], Tensor]:
        """Gives a weight by name: outsize/runtime/storage/states.py."""
        return self.states.weight_reader()

    def reader(self) -> Callable[[str, str | None], Tensor]:
        """Gives a state of a parameter, or (None) its weight: outsize/runtime/storage/states.py."""
        return self.states.reader()

    def load(self, value: Fill | None, state: Fill) -> None:
        """Replace every weight (value None: they stay) and every optimizer state, one at a time.

        value(parameter name, out) writes a weight into a tensor, state("parameter.state", out) a
        state.
        """
        self.states.load(value, state)

    def update_counts(self) -> dict[str, int]:
        """Updates that each parameter has had."""
        return self.states.update_counts()

    def restore_counts(self, counts: Mapping[str, int]) -> None:
        """Set the updates that each parameter has had; the weights were loaded before."""
        self.states.restore_counts(counts)
