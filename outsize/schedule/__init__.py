"""Schedules: for each worker the ordered actions of one step, and their proof."""

from typing import TYPE_CHECKING

from outsize.lazy import importing

if TYPE_CHECKING:
    from outsize.schedule.action import Action, Kind, Lane, State
    from outsize.schedule.compile.forward import compile_forward
    from outsize.schedule.compile.tokens import compile_tokens
    from outsize.schedule.compile.train import compile_plan
    from outsize.schedule.program import Program
    from outsize.schedule.proof import prove
    from outsize.schedule.schedule import Schedule

__getattr__ = importing(__name__)
