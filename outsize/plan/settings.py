"""Settings of plans that techniques add: each is `plan.NAME` in a run's file and a keyword of Plan.

A technique's file registers a PlanSetting with all that others need to know of it. Run files, the
planner, plan files, explanations and `outsize verify` pass settings on and never name one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, TypeVar, get_type_hints

from outsize.collectives.axes import Clash
from outsize.errors import OutsizeError
from outsize.registry import Registry, Setting
from outsize.typed import Open

if TYPE_CHECKING:
    from outsize.plan.plan import Plan

C = TypeVar("C")


@dataclass(frozen=True)
class PlanSetting:
    """A whole number of a plan, 0 or more; 0: nothing is done otherwise.

    meaning: in a line. clashes: what a plan that has it may not have. touches: as a Technique's.
    axis: of the mesh, that needs several workers. native: why only native decoders have it, if so.
    recompute: what a plan recomputes that has it, where nobody says. tokens: it is how many tokens
    are in a block at once. sums: the order in which sums are taken depends on it, so that a run
    that goes on keeps it. tighter: the planner chooses, where nobody says: for the smallest plan
    without it, two values, the second one for less memory; None: it is 0 then. quicker: the planner
    weighs, where nobody says, these values by the predicted seconds of a plan without it, the
    first of them that fits. worth: of a step's time, under which one is taken; None: as usual.
    by_rows: it is how many blocks at the front share rows over the tensor axis, so that parameters
    lie otherwise. draws: what `verify --random` chooses from. approximate: the technique that must
    be named for it, if it is of one. run: it is a key of runs, too; else of plan files alone.
    """

    name: str
    meaning: str
    clashes: tuple[Clash, ...] = ()
    touches: frozenset[str] = frozenset()
    axis: str = ""
    native: str = ""
    recompute: tuple[str, ...] = ()
    tokens: bool = False
    sums: bool = False
    tighter: Callable[[Plan], tuple[int, int]] | None = None
    quicker: Callable[[Plan], tuple[int, ...]] | None = None
    worth: float | None = None
    by_rows: bool = False
    draws: tuple[int, ...] = (0,)
    approximate: str = ""
    run: bool = True

    @property
    def leaf(self) -> Setting:
        """It as a key of a run."""
        left = self.tighter is not None or self.quicker is not None
        kind, default = (int | None, None) if left else (int, 0)
        return Setting(self.name, kind, default, self.meaning, 0, may_change=not self.sums)

    @property
    def key(self) -> str:
        """What a refusal names."""
        return self.name

    def of(self, plan: Plan) -> int:
        """Its value in a plan."""
        return plan.settings.get(self.name) or 0

    def refusal(self, plan: Plan, value: int = 1) -> str | None:
        """Why a plan cannot have it, in a line; None where it can."""
        if value < 0:
            return f"plan: {self.name} is {value}; expected 0 or more"
        if self.axis and plan.mesh[self.axis] == 1:
            return (
                f"plan.{self.name} is {value}, but mesh.{self.axis} is 1 and nothing would be"
                f" done; set it to 0, or mesh to {self.axis}=2"
            )
        if self.approximate not in ("", *plan.approximate):
            return (
                f"plan.{self.name} is {value}, but plan.approximate does not hold"
                f" {self.approximate}; add it, or leave {self.name} out"
            )
        found = next((clash for clash in self.clashes if clash.found(plan)), None)
        said = f"plan: {self.name} is {value}"
        return None if found is None else f"{said}, {found.what}; {found.remedy}"


PLAN_SETTINGS: Registry[PlanSetting] = Registry("setting of plans")


@dataclass(frozen=True)
class Settings:
    """(name, value) of what is said, in order of the names."""

    said: tuple[tuple[str, int], ...] = ()

    def get(self, name: str) -> int | None:
        """The value of a name, None where nothing is said."""
        return dict(self.said).get(name)

    def having(self, values: Mapping[str, int | None]) -> Settings:
        """With these; None: nothing is said any more."""
        every = {**dict(self.said), **values}
        return Settings(tuple(sorted((n, v) for n, v in every.items() if v is not None)))

    @property
    def changed(self) -> Settings:
        """Without those that are 0."""
        return Settings(tuple(one for one in self.said if one[1]))

    @property
    def closed(self) -> Settings:
        """The same with all said: 0 where nothing was."""
        return Settings().having({**dict.fromkeys(PLAN_SETTINGS.names(), 0), **dict(self.said)})

    def every(self) -> list[tuple[PlanSetting, int]]:
        """Those that are said."""
        return [(PLAN_SETTINGS.get(name), value) for name, value in self.said]

    def weighed(self, plan: Settings) -> Settings:
        """With a plan's values of those that the planner weighs and that nobody has said."""
        names = {name for name, one in PLAN_SETTINGS.items() if one.quicker is not None}
        mine = dict(plan.closed.said)
        return self.having({name: mine[name] for name in names if self.get(name) is None})

    @property
    def by_rows(self) -> int:
        """Blocks at the front whose weights are whole on every worker of the tensor axis, which
        share the rows of a microbatch there."""
        return max((value for one, value in self.every() if one.by_rows), default=0)

    def sharing(self, blocks: int) -> Settings:
        """With so many of these, where there are some."""
        return self.having({name: blocks for name, _ in self.laying.changed.said})

    @property
    def laying(self) -> Settings:
        """Those alone by which parameters lie otherwise."""
        return Settings(tuple((one.name, value) for one, value in self.every() if one.by_rows))

    def summing(self) -> Settings:
        """Those on which the order of sums depends, all said."""
        names = {name for name, one in PLAN_SETTINGS.items() if one.sums}
        return Settings(tuple((n, v) for n, v in self.closed.said if n in names))

    def check(self, plan: Plan) -> None:
        """OutsizeError for the first that does not go with the plan."""
        for one, value in self.every():
            if refusal := one.refusal(plan, value):
                raise OutsizeError(refusal)


NONE = Settings()


def extended(cls: type[C]) -> type[C]:
    """Have a dataclass with the field `settings` take each of them as a keyword, too."""
    make: Callable[..., None] = cls.__init__
    own = {field.name for field in fields(cls)}  # type: ignore[arg-type]

    def init(self: C, *args: Any, settings: Settings = NONE, **values: Any) -> None:
        more = {name: PLAN_SETTINGS.find(name) for name in set(values) - own}
        added = {name: (values.pop(name), one.leaf.default) for name, one in more.items() if one}
        said = {
            name: None if value == default else value for name, (value, default) in added.items()
        }
        make(self, *args, settings=settings.having(said), **values)

    cls.__init__ = init  # type: ignore[assignment]
    return cls


class Extended(Open):
    """A dataclass that is `extended`: its settings are read by name as its fields are, and lie
    among them in a file."""

    @classmethod
    def hints(cls) -> dict[str, Any]:
        found = get_type_hints(cls)
        del found["settings"]
        return {**found, **dict.fromkeys(PLAN_SETTINGS.names(), int)}

    if not TYPE_CHECKING:  # those who have types say `PlanSetting.of`

        def __getattr__(self, name: str) -> int:
            if name.startswith("_") or PLAN_SETTINGS.find(name) is None:
                raise AttributeError(f"{type(self).__name__} has no {name!r}", name=name, obj=self)
            return self.settings.get(name) or 0
