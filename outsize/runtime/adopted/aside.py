"""What a block does beside returning something: it writes into what it received, or leaves a tensor
where the module's code finds it (an attribute, a list of its own).

Plain PyTorch sees both. Here the block has copies of the lists and dictionaries that it received,
and is computed at another time than the code around it, so that both are refused: where the module
can be computed whole it is (`Uncut`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode

from outsize.errors import OutsizeError
from outsize.runtime.adopted.reach import Uncut
from outsize.runtime.again import Leaves
from outsize.torch_private import changes, transforming, tree_flatten, tree_leaves

_REMEDY = "return it instead, or name other blocks by a path pattern"


def unchanged(path: str, forward: Callable[..., Any]) -> Callable[..., Any]:
    """A block's forward that refuses to write into the lists and dictionaries that it is given."""

    def watched(*args: Any, **kwargs: Any) -> Any:
        before, form = tree_flatten((args, kwargs))
        given = forward(*args, **kwargs)
        after, now = tree_flatten((args, kwargs))
        if now != form or any(a is not b for a, b in zip(before, after, strict=True)):
            raise Uncut(
                f"block {path!r} writes into a list or a dictionary that it receives, which nobody"
                f" else would see; {_REMEDY}"
            )
        return given

    return watched


class Written:
    """Whether a block writes into tensors that it receives. again: it is computed twice."""

    def __init__(self, path: str, leaves: Leaves, again: bool) -> None:
        self._path, self._again = path, again
        self._before = [(leaf, leaf.requires_grad, _version(leaf)) for leaf in leaves]

    def check(self) -> None:
        """After it has run. Numbers that need no gradient may be counted in place, once."""
        for leaf, cut, version in self._before:
            if _version(leaf) != version and (self._again or cut or leaf.requires_grad):
                raise self._refusal()

    def refused(self, error: RuntimeError) -> Exception:
        """What to raise in the place of an error of its run: of an input that is a leaf here."""
        return self._refusal() if "a leaf Variable that requires grad" in str(error) else error

    def _refusal(self) -> Uncut:
        return Uncut(
            f"block {self._path!r} changes a tensor that it receives in place (as"
            f" nn.ReLU(inplace=True) does), which is another's here; {_REMEDY}"
        )


def passing(path: str, run: Callable[[Leaves], Leaves]) -> Callable[[Leaves], Leaves]:
    """A block's first run, of two: its graph is there and keeps nothing. The block's own outputs
    are cut from it; whatever else is differentiated through it has been left elsewhere."""

    def unpack(_: None) -> Tensor:
        raise OutsizeError(
            f"block {path!r} leaves a tensor elsewhere than in what it returns (in an attribute, a"
            " list), and the loss is differentiated through it; the block is computed again, so"
            " return the tensor, or set recompute to nothing and leave out tiers"
        )

    def first(tensors: Leaves) -> Leaves:
        if torch.is_grad_enabled():
            return run(tensors)
        with torch.enable_grad(), saved_tensors_hooks(lambda _: None, unpack):
            return run(tensors)

    return first


@contextmanager
def own_graphs() -> Iterator[None]:
    """While code is differentiated: says what it means that a graph was let go of by another."""
    try:
        yield
    except RuntimeError as error:
        if "backward through the graph a second time" not in str(error):
            raise
        raise Uncut(
            "blocks share a graph beside the tensors that they receive, as of a cache filled"
            " before the first one; pass them tensors, or leave out memory and tiers"
        ) from None


@contextmanager
def through_blocks() -> Iterator[None]:
    """While the code around the blocks runs: says what it means that PyTorch finds no way from one
    of its tensors to another."""
    try:
        yield
    except RuntimeError as error:
        if "appears to not have been used in the graph" not in str(error):
            raise
        raise _differentiated() from None


class Around(TorchFunctionMode):
    """While the code around the blocks runs: refuses what reads a parameter of a block that is not
    on the device then, and what is differentiated there, where a block may lie between. away: their
    names, by identity; called: whether a block has been."""

    def __init__(self, away: Mapping[int, str], called: Callable[[], bool]) -> None:
        super().__init__()
        self._away, self._called = away, called

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in _GRADIENTS and self._called():
            raise _differentiated()
        if self._away and getattr(func, "__name__", "") != "__get__":  # its shape is known
            for leaf in tree_leaves((args, kwargs)):
                if id(leaf) in self._away:
                    raise OutsizeError(
                        f"code around the blocks, or the loss, reads {self._away[id(leaf)]!r}, a"
                        " parameter of a block, which is not on the device when that code runs;"
                        " compute what it needs inside the block, or leave out tiers"
                    )
        return func(*args, **(kwargs or {}))


_GRADIENTS = (torch.autograd.grad, torch.autograd.backward, Tensor.backward)


def refuse_transforms(path: str) -> None:
    """Refuse a call of a block inside torch.func: its inputs are values of the transform. So of
    forward-mode differentiation, whose tangents end where a graph is cut."""
    if transforming():
        raise Uncut(
            f"block {path!r} is called inside torch.func (vmap, grad, jvp) or forward_ad, which"
            " would have to see what it computes; name other blocks by a path pattern, or leave out"
            " memory, tiers, mesh and recompute"
        )


def _differentiated() -> Uncut:
    return Uncut(
        "code around the blocks, or the loss, is differentiated where it runs (torch.autograd.grad,"
        " as of a gradient penalty), and its graph is cut at each block; do it inside a block, or"
        " leave out memory, tiers, mesh and recompute"
    )


def called_late(path: str) -> OutsizeError:
    """Of a block that the code around it computes again, when its parameters are elsewhere."""
    return OutsizeError(
        f"block {path!r} is called in the backward pass, as by torch.utils.checkpoint around it,"
        " when its parameters or their gradients are elsewhere; call it without (recompute="
        "['block'] keeps its inputs alone), or leave out tiers and mesh"
    )


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else changes(tensor)
