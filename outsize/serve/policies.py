"""Policies: which requests a step feeds, and how many tokens of each.

A policy is a pure function of what waits, of the clock and of foretold seconds. It names requests
in the order of their urgency, all that have begun among them, with the tokens that the step feeds
of each, 0 for none. Who lacks a page or a slot takes it from those behind him in that order, the
last ones first; what they had is fed again when their turn comes, as far as it is not kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from outsize.errors import OutsizeError
from outsize.registry import Registry
from outsize.serve.price import FREE, Price
from outsize.serve.slo import NONE, Slo, parse_slo

_TURNS = 4.0  # times as long as those of the level above
_AGE = 10.0  # turns of waiting that lift by a level


class Waiting(NamedTuple):
    """A request as a policy sees it. key: its own; tokens: that wait to be fed, 1 where the prompt
    is through; begun: whether it has a slot and pages; prompt: whether what waits is of a prompt.

    start: tokens in pages; first: foretold seconds of a step of its whole prompt; came, last:
    seconds of the clock, of its coming and of its last token (-1: none); spent: foretold seconds of
    the steps that fed it; owner: who asks."""

    key: int
    tokens: int
    begun: bool
    prompt: bool
    start: int = 0
    first: float = 0.0
    came: float = 0.0
    last: float = -1.0
    spent: float = 0.0
    owner: str = ""


@dataclass(frozen=True)
class View:
    """requests: in the order in which they came; budget: tokens of a step at most; slots: requests
    that may have begun at once; now: seconds of the clock; shares: by owner, what he has had of
    late, in tokens."""

    requests: Sequence[Waiting]
    budget: int
    slots: int
    now: float = 0.0
    price: Price = FREE
    slo: Slo = NONE
    shares: Mapping[str, float] = field(default_factory=dict)


Step = dict[int, int]
Policy = Callable[[View], Step]
POLICIES: Registry[Policy] = Registry("policy")


def parse_policy(text: str) -> tuple[str, Slo]:
    """Of "deadline", or "deadline:ttft=500ms,tpot=50ms": a name and what is promised. OutsizeError
    for promises that are none."""
    name, colon, promised = text.partition(":")
    return name, parse_slo(promised, "policy") if colon else NONE


def chosen(name: str, slo: Slo) -> Policy:
    """The policy of a name. OutsizeError for an unknown one, and one that wants an SLO."""
    found = POLICIES.get(name)
    if found is deadline and not slo:
        raise OutsizeError(
            f"policy {name} goes by what is promised; serve with --slo ttft=500ms,tpot=50ms (from"
            f" Python policy='{name}:ttft=500ms,tpot=50ms'), or by another policy"
        )
    return found


def first_come(view: View) -> Step:
    """Whoever came first has all that he waits for, a whole prompt or the next token, and so on
    until the step is full (Yu et al., "Orca", 2022)."""
    return _in_turn(view, _slices(view, view.requests, view.budget))


def prompt_first(view: View) -> Step:
    """Prompts before anything else, as first servers of continuous batches did it: the first
    tokens come soonest, and everybody's next one waits."""
    return _in_turn(view, _slices(view, _prompts(view), view.budget) or _drawing(view))


def mixed(view: View) -> Step:
    """The next token of everybody, and slices of prompts in what is left of the step: nobody waits
    for another's prompt (Agrawal et al., "Sarathi-Serve", 2024)."""
    fed = _drawing(view)
    return _in_turn(view, fed | _slices(view, _prompts(view), view.budget - len(fed)))


def decode_maximal(view: View) -> Step:
    """One slice of one prompt beside the next token of everybody (Agrawal et al., "SARATHI",
    2023)."""
    fed = _drawing(view)
    return _in_turn(view, fed | _slices(view, _prompts(view), view.budget - len(fed), most=1))


def fixed(view: View) -> Step:
    """As mixed, in steps of one number of tokens: so many that more would bring few more a second,
    by the foretold price (Holmes et al., "DeepSpeed-FastGen", 2024)."""
    fed = _drawing(view)
    budget = min(view.budget, view.price.enough)
    return _in_turn(view, fed | _slices(view, _prompts(view), budget - len(fed)))


def feedback(view: View) -> Step:
    """Levels whose turns last longer, one after another: who has had a level's turn falls to the
    next, and a prompt that takes longer than a turn joins further down (Wu et al., "FastServe",
    2023). Who has waited ten such turns rises again. The uppermost requests go, whoever is
    interrupted for them."""
    turn = max(view.price.token, 1e-9)

    def level(one: Waiting) -> int:
        joins = math.ceil(math.log(max(1.0, one.first / turn), _TURNS))
        found = int(math.log(_TURNS**joins + one.spent / turn, _TURNS))
        waited = max(0.0, view.now - one.came - one.spent)
        return max(0, found - int(waited / (_AGE * turn * _TURNS**found)))

    order = sorted(view.requests, key=lambda one: (level(one), one.key))
    fed, left = dict[int, int](), view.budget - sum(map(_draws, order[: view.slots]))
    for one in order[: view.slots]:
        fed[one.key] = 1 if _draws(one) else max(0, min(one.tokens, left))
        left -= 0 if _draws(one) else fed[one.key]
    return fed | {one.key: 0 for one in order[view.slots :] if one.begun}


def deadline(view: View) -> Step:
    """Everybody's next token, and then prompts by when they are due, those first that can still be
    in time by what is foretold of them."""

    def due(one: Waiting) -> float:
        return one.came + view.slo.ttft if one.last < 0 else one.last + view.slo.tpot

    def urgency(one: Waiting) -> tuple[bool, float, int]:
        at = due(one)
        late = view.now + view.price.prompt(one.tokens, one.start) > at
        return late, at, one.key

    drawing = sorted((one for one in view.requests if _draws(one)), key=urgency)
    fed = {one.key: 1 for one in drawing}
    order = sorted(_prompts(view), key=urgency)
    fed |= _slices(view, order, view.budget - len(fed))
    return {one.key: fed.get(one.key, 0) for one in (*drawing, *order)
            if one.begun or one.key in fed}  # fmt: skip


def fair(view: View) -> Step:
    """As mixed, and the next prompt is of whoever has had least (Sheng et al., "Fairness in Serving
    Large Language Models", 2023: the virtual token counter)."""
    fed, had = _drawing(view), dict(view.shares)
    going, queues = list[Waiting](), dict[str, list[Waiting]]()
    for one in _prompts(view):
        if one.begun:
            going.append(one)
            had[one.owner] = had.get(one.owner, 0.0) + one.tokens
        else:
            queues.setdefault(one.owner, []).append(one)
    free = view.slots - sum(one.begun for one in view.requests)
    for _ in range(min(free, sum(map(len, queues.values())))):
        owner = min(queues, key=lambda each: (had.get(each, 0.0), queues[each][0].key))
        going.append(queues[owner].pop(0))
        had[owner] = had.get(owner, 0.0) + going[-1].tokens
        if not queues[owner]:
            del queues[owner]
    return _in_turn(view, fed | _slices(view, going, view.budget - len(fed)))


def _draws(one: Waiting) -> bool:
    return one.begun and not one.prompt


def _drawing(view: View) -> Step:
    """Everybody's next token."""
    return {one.key: 1 for one in view.requests if one.begun and not one.prompt}


def _prompts(view: View) -> list[Waiting]:
    return [one for one in view.requests if one.prompt or not one.begun]


def _slices(view: View, order: Iterable[Waiting], left: int, most: int = 1 << 40) -> Step:
    """Of `most` requests in this order, what they wait for, as far as tokens and slots last."""
    fed, slots = dict[int, int](), view.slots - sum(one.begun for one in view.requests)
    for one in order:
        if left <= 0 or (not one.begun and slots <= 0) or len(fed) == most:
            break
        fed[one.key] = min(one.tokens, left)
        left -= fed[one.key]
        slots -= not one.begun
    return fed


def _in_turn(view: View, fed: Step) -> Step:
    """Who came first is the most urgent, but for who has not begun: he takes from nobody."""
    going = {one.key: fed.get(one.key, 0) for one in view.requests if one.begun}
    return going | {key: count for key, count in fed.items() if key not in going}


# With all slots taken and everybody drawing, these feed a token of each, whatever the clock says.
PATIENT = frozenset((first_come, prompt_first, mixed, decode_maximal, fixed, deadline, fair))
for _name, _policy in (
    ("first-come", first_come), ("prompt-first", prompt_first), ("mixed", mixed),
    ("decode-maximal", decode_maximal), ("fixed", fixed), ("feedback", feedback),
    ("deadline", deadline), ("fair", fair),
):  # fmt: skip
    POLICIES.add(_name, _policy)
