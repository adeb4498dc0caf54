"""Policies: which requests a step feeds, and how many tokens of each.

A policy is a pure function of what waits. Every request that goes has pages for what is fed; a
policy that wants more pages than are left is cut by the engine, the last ones first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from outsize.registry import Registry


class Waiting(NamedTuple):
    """A request as a policy sees it. key: its own; tokens: that wait to be fed, 1 where the prompt
    is through; begun: whether it has pages; prompt: whether what waits is of a prompt."""

    key: int
    tokens: int
    begun: bool
    prompt: bool


@dataclass(frozen=True)
class View:
    """requests: in the order in which they came; budget: tokens of a step at most; slots: requests
    that may have begun at once."""

    requests: Sequence[Waiting]
    budget: int
    slots: int


Policy = Callable[[View], dict[int, int]]
POLICIES: Registry[Policy] = Registry("policy")


def mixed(view: View) -> dict[int, int]:
    """The next token of everybody, and slices of prompts in what is left of the budget: nobody
    waits for another's prompt (Agrawal et al., "SARATHI", 2023; chunked prefills)."""
    fed = {one.key: 1 for one in view.requests if one.begun and not one.prompt}
    return fed | _prompts(view, view.budget - len(fed))


def prompt_first(view: View) -> dict[int, int]:
    """Prompts before anything else (Yu et al., "Orca", 2022, as first servers did it): the first
    tokens come soonest, and everybody's next one waits."""
    fed = _prompts(view, view.budget)
    return fed or {one.key: 1 for one in view.requests if one.begun}


def _prompts(view: View, left: int) -> dict[int, int]:
    """Prompts in the order of their coming, as far as tokens and slots last."""
    fed, slots = dict[int, int](), view.slots - sum(one.begun for one in view.requests)
    for one in view.requests:
        if one.begun and not one.prompt:
            continue
        if left <= 0 or (not one.begun and slots <= 0):
            break
        fed[one.key] = min(one.tokens, left)
        left -= fed[one.key]
        slots -= not one.begun
    return fed


POLICIES.add("mixed", mixed)
POLICIES.add("prompt-first", prompt_first)
