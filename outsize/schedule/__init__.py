"""Schedules: for each worker the ordered actions of one step, their text form and their proof."""

from outsize.schedule.action import Action, Kind, Lane, State
from outsize.schedule.compiler import compile_forward, compile_plan, compile_tokens
from outsize.schedule.schedule import Schedule
from outsize.schedule.validate import validate

__all__ = [
    "Action",
    "Kind",
    "Lane",
    "Schedule",
    "State",
    "compile_forward",
    "compile_plan",
    "compile_tokens",
    "validate",
]
