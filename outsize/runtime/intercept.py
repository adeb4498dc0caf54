"""The one way in which the runtime takes over the calls of a module that it did not write.

Blocks of an adopted module give their calls to the schedule, and any part of any block may be
computed again, in tiles, or spill what it keeps. A module's own code, its parameters' names and
what is hooked to it stay: while it lasts, the module is of a subclass of its own class, whose
forward is the given one. Hooks run outside of it. Copies of the module, and what is pickled of it,
are of its own class: they compute with what they have themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, SupportsIndex

from torch import nn

Undo = Callable[[], None]


def intercept(module: nn.Module, forward: Callable[..., Any]) -> Undo:
    """Have calls of `module` run `forward`; gives what ends that. Interceptions of one module end
    in the reverse order. A forward that the module has of itself, not of its class, comes back."""
    own, before = type(module), module.__dict__.pop("forward", None)

    def called(_: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    def reduced(one: nn.Module, _: SupportsIndex) -> Any:
        found: Any = own.__reduce_ex__(one, 1)  # 2 insists on the class that it has now
        make, given, *state = found
        if given and given[0] is type(one):
            given = (own, *given[1:])
        if before is not None and state and isinstance(state[0], dict):
            state[0] = {**state[0], "forward": before}
        return make, given, *state

    body: dict[str, Any] = {"forward": called, "__reduce_ex__": reduced}
    body |= {"__module__": own.__module__, "__qualname__": own.__qualname__}
    standing = type(own.__name__, (own,), body)
    module.__class__ = standing

    def undo() -> None:
        assert type(module) is standing, f"{own.__name__}: intercepted by others since"
        module.__class__ = own
        if before is not None:
            module.__dict__["forward"] = before

    return undo
