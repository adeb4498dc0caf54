"""A block of an adopted module in chunks of the sequence, forward and back, exactly.

The block's own code runs on the tokens of one chunk after another. Its attention is taken over
where PyTorch has it, in `scaled_dot_product_attention`: the queries of a chunk meet the keys and
values of all tokens up to its end, which earlier chunks have left. Going back, chunks go from the
last to the first, as those of native blocks do (outsize/runtime/sequence.py). Whether anything else
lets a token see others is found out on the first tokens, which run both ways.

B rows, S tokens of a row, C of a chunk, H heads, G key-value heads, K head size, W value size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from outsize.errors import OutsizeError
from outsize.models.chunk import Left
from outsize.models.chunked import ChunkAttend, attended
from outsize.models.seams import AttendSpec
from outsize.runtime.again import Call, Replay, backward
from outsize.runtime.flow import Record
from outsize.runtime.runners import StageRecord
from outsize.runtime.spill import Spill
from outsize.torch_private import FakeTensor

_FEW, _PIECE = 12, 5  # tokens that run both ways, and of a piece of these
_HIDES = -1e3  # what is added to a score that nobody is to see, at most
# By dims of an input: the one that counts tokens, if its size is theirs.
_TOKENS = {1: (0,), 2: (1, 0), 3: (1,), 4: (2, 1)}


def called(
    path: str,
    module: nn.Module,
    call: Call,
    leaves: list[Tensor],
    chunk: int,
    spill: Spill | None,
    checked: set[tuple[str, bool]],
) -> StageRecord:
    """What a block keeps of a call that is computed again, so many tokens at a time. checked: what
    blocks have been looked at, and whether they were training."""
    if chunk < 2:
        raise OutsizeError(
            f"plan: sequence_chunk is {chunk} and {path!r} is of an adopted module, whose attention"
            " of a single token does not say what that sees; set it to 2 or more"
        )
    tokens = _tokens(leaves)
    if tokens <= chunk:
        return Record(call.run, leaves, spill, own=False)
    made = ChunkedCall(path, module, call, leaves, spans(tokens, chunk))
    fake = any(isinstance(x, FakeTensor) for x in leaves)
    if not fake and (path, module.training) not in checked:
        made.check()
        checked.add((path, module.training))
    return made


def spans(tokens: int, chunk: int) -> list[slice]:
    """The chunks of a row; none has a single token."""
    starts = [*range(0, max(1, tokens - 1), chunk), tokens]
    return [slice(a, b) for a, b in pairwise(starts)]


def _tokens(leaves: Sequence[Tensor]) -> int:
    """Of a row, by the first input that has rows of vectors; 0 where none has."""
    found = (x.shape[1] for x in leaves if x.ndim == 3 and x.is_floating_point())
    return next(found, 0)


def _dim(x: Tensor, tokens: int) -> int | None:
    """Which dim of an input counts the tokens; None where it goes to every chunk whole."""
    dims = _TOKENS.get(x.ndim, (1,))
    if x.ndim == 2 and x.shape[0] == x.shape[1]:
        dims = (0,)  # a mask: what each token sees
    return next((d for d in dims if x.ndim and x.shape[d] == tokens), None)


class ChunkedCall:
    """What Record is, of a block's call, a chunk at a time. Between the passes it keeps the call's
    inputs alone."""

    def __init__(
        self, path: str, module: nn.Module, call: Call, leaves: list[Tensor], every: list[slice]
    ) -> None:
        self.path, self.module, self.call, self.inputs = path, module, call, leaves
        self.every, self.tokens = every, every[-1].stop
        self.dims = [_dim(x, self.tokens) for x in leaves]
        self._calls = 0  # of attention in a chunk
        self._seen: Seen | None = None

    def forward(self, keep: bool) -> list[Tensor]:
        """Run without a graph."""
        assert not keep, "a block that runs in chunks is recomputed whole"
        seen = Seen(self.tokens)
        outs = self._run(self.inputs, seen, self.every)
        self._calls = len(seen.left)
        return outs

    @torch.no_grad()
    def again(self) -> None:
        """Find what all tokens leave for others."""
        self._seen = Seen(self.tokens)
        if not self._calls:
            return
        for here in self.every:
            with suppress(_Enough), Attending(self._seen, here, last=self._calls):
                self.call.run(self._at(self.inputs, here))

    def backward(self, gradients: list[Tensor | None]) -> list[Tensor | None]:
        """Differentiate; adds to the gradients of the inputs and lets everything go."""
        seen, self._seen = self._seen, None
        assert seen is not None, "a block is computed again before it is differentiated"
        cut = {i for i, x in enumerate(self.inputs) if x.requires_grad and self.dims[i] is not None}
        made = {i: torch.zeros_like(self.inputs[i]) for i in cut}
        given = [(i, g) for i, g in enumerate(gradients) if g is not None]
        for here in reversed(self.every):
            tensors = self._at(self.inputs, here)
            for i in cut:
                tensors[i] = tensors[i].detach().requires_grad_()
            with torch.enable_grad(), Attending(seen, here):
                outs = self.call.run(tensors)
            pairs = [(outs[i], g[:, here]) for i, g in given]
            backward([out for out, _ in pairs], [g for _, g in pairs])
            for i in cut:
                if (grad := tensors[i].grad) is not None:
                    _part(made[i], self.dims[i], here).copy_(grad)
        for i, gradient in made.items():
            x = self.inputs[i]
            x.grad = gradient if x.grad is None else x.grad.add_(gradient)
        return [x.grad for x in self.inputs]

    # -- chunks -----------------------------------------------------------------------------------

    def _at(self, tensors: Sequence[Tensor], here: slice) -> list[Tensor]:
        return [_part(x, dim, here) for x, dim in zip(tensors, self.dims, strict=True)]

    @torch.no_grad()
    def _run(self, tensors: Sequence[Tensor], seen: Seen, every: Sequence[slice]) -> list[Tensor]:
        """The block's outputs, chunk after chunk."""
        made: list[Tensor] = []
        tokens = every[-1].stop
        for here in every:
            with Attending(seen, here):
                outs = self.call.run(self._at(tensors, here))
            count = here.stop - here.start
            for out in outs:
                if out.ndim < 2 or out.shape[1] != count:
                    raise self._refusal(f"it gives a tensor of shape {tuple(out.shape)}")
            if not made:
                made = [out.new_empty((out.shape[0], tokens, *out.shape[2:])) for out in outs]
            for whole, out in zip(made, outs, strict=True):
                whole[:, here] = out
        return made

    # -- whether it can run like this ------------------------------------------------------------

    @torch.no_grad()
    def check(self) -> None:
        """Refuse a block whose first tokens, in chunks, are others than together, or that draws."""
        few = slice(0, min(_FEW, self.tokens))
        first = [_square(x, self.tokens, few) for x in self._at(self.inputs, few)]
        before = Replay(self.module).states
        together = [out.clone() for out in self.call.run(first)]
        try:
            apart = self._run(first, Seen(few.stop), spans(few.stop, _PIECE))
        except OutsizeError:
            raise
        except (RuntimeError, IndexError, ValueError) as error:
            raise self._refusal(f"its first tokens, in chunks, fail: {error}") from None
        states = zip(before, Replay(self.module).states, strict=True)
        if any(not torch.equal(*pair) for pair in states):
            raise self._refusal("it draws random numbers, which would be others: set dropout to 0")
        if not all(map(_alike, apart, together)):
            raise self._refusal(
                "its tokens see others by more than causal scaled_dot_product_attention (Hugging"
                " Face: attn_implementation='sdpa')"
            )

    def _refusal(self, why: str) -> OutsizeError:
        return OutsizeError(
            f"plan: sequence_chunk is {self.every[0].stop} and block {self.path!r} cannot run in"
            f" chunks of the sequence: {' '.join(why.split())}; set it to 0"
        )


def _part(x: Tensor, dim: int | None, here: slice) -> Tensor:
    return x if dim is None else x.narrow(dim, here.start, here.stop - here.start)


def _square(x: Tensor, tokens: int, few: slice) -> Tensor:
    """A mask that says what each of the first tokens sees of the first ones."""
    mask = x.ndim in (2, 4) and x.shape[-1] == tokens and x.shape[-2] == few.stop
    return x[..., few] if mask and tokens > few.stop else x


def _alike(a: Tensor, b: Tensor) -> bool:
    """Equal but for rounding."""
    if not a.is_floating_point():
        return torch.equal(a, b)
    near = torch.finfo(a.dtype).eps ** 0.6 * float(b.abs().max())
    return bool(((a - b).abs() <= near).all())


# -- attention -----------------------------------------------------------------------------------


class _Enough(BaseException):
    """A block has left all that later tokens ask for: the rest of it need not run."""


class Seen:
    """What a block's tokens leave: of each of its calls of attention the keys and values. Rows are
    laid side by side as heads: (S, B G, K)."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self.left: list[Left] = []

    def of(self, call: int) -> Left:
        """Of a call of attention in its turn."""
        if call == len(self.left):
            self.left.append(Left((0, self.tokens)))
        return self.left[call]


class Attending(TorchFunctionMode):
    """While entered, the attention of a chunk's tokens to one another is that to all before them
    too. last: the call after which nothing is left to keep, 0 where the block runs to its end."""

    def __init__(self, seen: Seen, here: slice, last: int = 0) -> None:
        super().__init__()
        self.seen, self.here, self.last = seen, here, last
        self.count = here.stop - here.start
        self.call = 0

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is F.scaled_dot_product_attention:
            return self.attend(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """As PyTorch's; what sees other tokens than the block's goes on as it is."""
        own = query.ndim == 4 and query.shape[-2] == key.shape[-2] == self.count
        masked = attn_mask is not None and attn_mask.shape[-1] == self.seen.tokens
        if not own or not (is_causal or masked):
            return F.scaled_dot_product_attention(
                query, key, value, attn_mask, dropout_p, is_causal, scale=scale,
                enable_gqa=enable_gqa,
            )  # fmt: skip
        if dropout_p:
            raise OutsizeError(
                f"plan: sequence_chunk is set and attention has dropout {dropout_p:g}, which would"
                " be other weights' in chunks; set it to 0"
            )
        held, self.call = self.seen.of(self.call), self.call + 1
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        o = self._joined(held, (query, key, value), attn_mask, scale, enable_gqa)
        if self.call == self.last:
            raise _Enough
        return o

    def _joined(
        self,
        held: Left,
        inputs: tuple[Tensor, Tensor, Tensor],
        mask: Tensor | None,
        scale: float,
        grouped: bool,
    ) -> Tensor:
        rows = inputs[0].shape[0]
        q_CXK, k_CYK, v_CYW = map(_beside, inputs)
        spec = AttendSpec(0, scale)
        if mask is None:
            o_CXW = ChunkAttend(held, self.here.start)(q_CXK, k_CYK, v_CYW, (), spec)
            return _apart(o_CXW, rows)
        stop = self.here.stop
        _check_hidden(mask[..., stop:])
        run = partial(_masked, rows, mask[..., :stop], scale, grouped)
        return _apart(attended(q_CXK, k_CYK, v_CYW, held, self.here.start, spec, run), rows)


def _beside(x_BHCK: Tensor) -> Tensor:
    """Rows beside one another, as heads."""
    return x_BHCK.permute(2, 0, 1, 3).flatten(1, 2)


def _apart(x_CXK: Tensor, rows: int) -> Tensor:
    """The other way round."""
    x_CBHK: Tensor = x_CXK.unflatten(1, (rows, -1))
    return x_CBHK.permute(1, 2, 0, 3)


def _masked(
    rows: int, mask: Tensor, scale: float, grouped: bool, q_CXK: Tensor, *seen: Tensor
) -> Tensor:
    q, k, v = (_apart(x, rows) for x in (q_CXK, *seen))
    return _beside(F.scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=grouped))


def _check_hidden(mask: Tensor) -> None:
    """OutsizeError where a token of a chunk sees what comes behind that."""
    if isinstance(mask, FakeTensor) or not mask.numel():
        return
    seen = mask if mask.dtype == torch.bool else mask > _HIDES
    if bool(seen.any()):
        raise OutsizeError(
            "plan: sequence_chunk is set and an attention mask lets tokens see later ones, which"
            " have not been computed then; set it to 0"
        )
