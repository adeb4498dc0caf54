"""Channel: tensors from one worker to another, one direction, in order, a few of them under way.

What is sent leaves in a thread of the channel's own, so that who computes does not wait for who
receives; only when `LIMIT` messages are under way does a further one wait. The first message of a
key says how many tensors it has, of which dtypes and shapes; the others of that key are the same,
so nothing but tensors travels.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from outsize import accelerator
from outsize.collectives.collective import Collective
from outsize.collectives.courier import Courier, Flight
from outsize.errors import OutsizeError

MessageKey = tuple[Hashable, ...]
LIMIT = 2  # messages: what the prover of schedules counts on (outsize/schedule/proof/)
_DTYPES = (
    torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32,
    torch.int16, torch.int8, torch.uint8, torch.bool,
)  # fmt: skip
HEADER = 128  # numbers of a message that says what others of its key are like


@dataclass(frozen=True)
class Form:
    """What a tensor of a message is like."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    def empty(self, device: torch.device) -> Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=device)


def form_of(tensor: Tensor) -> Form:
    return Form(tensor.dtype, tuple(tensor.shape))


class Sender:
    """The end that sends. pair: the two workers' collective, of this direction alone, this one
    first. name: of its thread. known: by key, what its messages are like."""

    def __init__(self, pair: Collective, device: torch.device, name: str) -> None:
        self._pair, self._device = pair, device
        self.known: dict[MessageKey, tuple[Form, ...]] = {}
        self._courier = Courier(LIMIT, name)
        self._fault: BaseException | None = None

    def send(self, key: MessageKey, tensors: Sequence[Tensor]) -> Flight:
        """Send tensors, which are left alone until what this gives is over. Waits while LIMIT
        messages are under way. key: what messages of the same forms have in common."""
        self.check()
        forms, fresh = tuple(map(form_of, tensors)), key not in self.known
        known = self.known.setdefault(key, forms)
        if known != forms:
            raise OutsizeError(f"message {key}: its tensors are {forms}; they were {known} before")

        def leave() -> None:
            self.check()
            try:
                if fresh:
                    self._pair.broadcast(header_of(forms).to(self._device), 0)
                for tensor in tensors:
                    if tensor.numel():
                        self._pair.broadcast(tensor.contiguous(), 0)
                accelerator.settle(self._device)
            except BaseException as fault:  # raised where the next message is sent, too
                self._fault = fault
                raise

        return self._courier.send(leave, self._device)

    def check(self) -> None:
        """Raise what went wrong with a message."""
        if self._fault is not None:
            raise self._fault

    def close(self) -> None:
        """End the thread once everything has left; raises what went wrong in it."""
        self._courier.close()
        self.check()


class Receiver:
    """The end that receives, in the thread that calls it. device: where tensors are made. known: as
    of a Sender."""

    def __init__(self, pair: Collective, device: torch.device) -> None:
        self._pair, self._device = pair, device
        self.known: dict[MessageKey, tuple[Form, ...]] = {}

    def forms(self, key: MessageKey) -> tuple[Form, ...] | None:
        """What a message of a key will be like, where one has come before."""
        return self.known.get(key)

    def receive(self, key: MessageKey, into: Sequence[Tensor] | None = None) -> list[Tensor]:
        """The next message, in tensors that are made here unless there are some."""
        if key not in self.known:
            header = torch.empty(HEADER, dtype=torch.int64, device=self._device)
            self.known[key] = forms_in(self._pair.broadcast(header, 0))
        if into is None:
            into = [form.empty(self._device) for form in self.known[key]]
        for tensor in into:
            if tensor.numel():
                self._pair.broadcast(tensor, 0)
        return list(into)


def header_of(forms: Sequence[Form]) -> Tensor:
    """Numbers that say what tensors of a message are like, always as many."""
    numbers = [len(forms)]
    for form in forms:
        numbers += [_DTYPES.index(form.dtype), len(form.shape), *form.shape]
    if len(numbers) > HEADER:
        raise OutsizeError(
            f"a message of {len(forms)} tensors between stages; expected fewer: cut the model where"
            " less is handed on"
        )
    return torch.tensor(numbers + [0] * (HEADER - len(numbers)), dtype=torch.int64)


def forms_in(header: Tensor) -> tuple[Form, ...]:
    """What a header says."""
    numbers = iter(header.tolist())
    found = []
    for _ in range(next(numbers)):
        dtype, dims = _DTYPES[next(numbers)], next(numbers)
        found.append(Form(dtype, tuple(next(numbers) for _ in range(dims))))
    return tuple(found)
