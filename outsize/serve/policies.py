"""Policies: which requests a step feeds, and how many tokens of each.

A policy is a pure function of what waits, of the clock and of foretold seconds. It names requests
in the order of their urgency, all that have begun among them, with the tokens that the step feeds
of each, 0 for none. Who lacks a page or a slot takes it from those behind him in that order, the
last ones first; what they had is fed again when their turn comes, as far as it is not kept.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from types import MappingProxyType
from typing import NamedTuple, Protocol

from outsize.errors import OutsizeError
from outsize.registry import Registry
from outsize.serve.price import FREE, Price
from outsize.serve.slo import NONE, Slo, parse_slo
from outsize.serve.waiting import Queue, Rank, Waiting

_TURNS = 4.0  # times as long as those of the level above
_AGE = 10.0  # turns of waiting that lift by a level
_ROUNDED = 1e-12  # of seconds, within which it is not known when a level changes


class Going(Protocol):
    """A request that has begun, as a policy sees it: the names are those of Waiting."""

    @property
    def tokens(self) -> int: ...
    @property
    def start(self) -> int: ...
    @property
    def first(self) -> float: ...
    @property
    def came(self) -> float: ...
    @property
    def last(self) -> float: ...
    @property
    def spent(self) -> float: ...
    @property
    def owner(self) -> str: ...


@dataclass(frozen=True)
class View:
    """going: by key, those that have begun, in the order in which they came; drawing: keys of those
    of them whose prompt is through; queue: the others; budget: tokens of a step at most; slots:
    requests that may have begun at once; now: seconds of the clock; shares: by owner, what he has
    had of late, in tokens; slowest: times what is foretold that few steps take longer than."""

    going: Mapping[int, Going]
    drawing: Collection[int]
    queue: Queue
    budget: int
    slots: int
    now: float = 0.0
    price: Price = FREE
    slo: Slo = NONE
    shares: Mapping[str, float] = field(default_factory=dict)
    slowest: float = 1.0

    @property
    def free(self) -> int:
        """Slots that nobody has."""
        return self.slots - len(self.going)


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


def unkept_by(name: str, slo: Slo) -> list[str]:
    """Lines of what a policy does not keep of what is promised, none where it keeps all."""
    if POLICIES.get(name) is not feedback or slo.ttft == math.inf or slo.tpot < math.inf:
        return []
    return [
        f"{slo} is not kept by {name} for long prompts, which join further down: promise tpot"
        " beside it, with which nobody is interrupted, or serve by another policy"
    ]


def first_come(view: View) -> Step:
    """Whoever came first has all that he waits for, a whole prompt or the next token, and so on
    until the step is full (Yu et al., "Orca", 2022)."""
    return _in_turn(view, _slices(view, _together(view, view.going), view.budget))


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
    budget = _enough(view.price, view.budget)
    return _in_turn(view, fed | _slices(view, _prompts(view), budget - len(fed)))


def _enough(price: Price, budget: int) -> int:
    return min(budget, price.enough)


def _whole(_: Price, budget: int) -> int:
    return budget


def feedback(view: View) -> Step:
    """Levels whose turns last longer, one after another: who has had a level's turn falls to the
    next, and a prompt that takes longer than a turn joins further down (Wu et al., "FastServe",
    2023). Who has waited ten such turns rises again. The uppermost requests go, whoever is
    interrupted for them."""
    turn = max(view.price.token, 1e-9)
    order = [(*_level(one, view.now, turn)[:2], key) for key, one in view.going.items()]
    order += view.queue.lowest(view.slots, view.now, _level, turn)
    keys = [key for _, _, key in sorted(order)]
    uppermost, fed = keys[: view.slots], dict[int, int]()
    left = view.budget - sum(key in view.drawing for key in uppermost)
    for key in uppermost:
        if key in view.drawing:
            fed[key] = 1
        else:
            fed[key] = max(0, min(_tokens(view, key), left))
            left -= fed[key]
    return fed | {key: 0 for key in keys[view.slots :] if key in view.going}


def _level(one: Going, now: float, turn: float) -> Rank:
    joins = math.ceil(math.log(max(1.0, one.first / turn), _TURNS))
    found = int(math.log(_TURNS**joins + one.spent / turn, _TURNS))
    rises = _AGE * turn * _TURNS**found
    waited = max(0.0, now - one.came - one.spent)
    risen = int(waited / rises)
    if found <= risen:
        return Rank(0)
    until = one.came + one.spent + (1 + risen) * rises
    return Rank(found - risen, until=until * (1 - _ROUNDED))


def deadline(view: View) -> Step:
    """Everybody's next token, and then prompts by when they are due, those first that can still be
    in time by what is foretold of them."""
    going, price, now = view.going, view.price, view.now
    # No token takes longer than that of the longest text: few have to be asked about apart.
    most = now + price.prompt(1, max((going[key].start for key in view.drawing), default=0))
    drawing = list[tuple[bool, float, int]]()
    for key in view.drawing:
        due = _due(going[key], view.slo)
        late = most > due and now + price.prompt(1, going[key].start) > due
        drawing.append((late, due, key))
    fed = dict.fromkeys([key for _, _, key in sorted(drawing)], 1)
    slicing = [(*_urgency(going[key], now, price, view.slo)[:2], key) for key in going
               if key not in view.drawing]  # fmt: skip
    come = view.queue.lowest(1 + max(0, view.free), now, _urgency, price, view.slo)
    prompts = [key for _, _, key in sorted((*slicing, *come))]
    slices = ((key, _tokens(view, key)) for key in prompts)
    fed |= _slices(view, slices, view.budget - len(fed))
    return fed | {key: 0 for key in prompts if key in going and key not in fed}


def _due(one: Going, slo: Slo) -> float:
    """When its next token is."""
    return one.came + slo.ttft if one.last < 0 else one.last + slo.tpot


def _urgency(one: Going, now: float, price: Price, slo: Slo) -> Rank:
    due, takes = _due(one, slo), price.prompt(one.tokens, one.start)
    if now + takes > due:
        return Rank(1, due)
    return Rank(0, due, due if due == math.inf else due - takes - _ROUNDED * due)


def fair(view: View) -> Step:
    """As mixed, and the next prompt is of whoever has had least (Sheng et al., "Fairness in Serving
    Large Language Models", 2023: the virtual token counter)."""
    fed, had, queue = _drawing(view), dict(view.shares), view.queue
    slicing = [(key, view.going[key].tokens) for key in view.going if key not in view.drawing]
    for key, tokens in slicing:
        owner = view.going[key].owner
        had[owner] = had.get(owner, 0.0) + tokens
    turns = by_turns(queue.owners, queue.__getitem__, had)
    slicing += [(one.key, one.tokens) for one in islice(turns, max(0, view.free))]
    return _in_turn(view, fed | _slices(view, slicing, view.budget - len(fed)))


def by_turns(
    owners: Mapping[str, Iterable[int]], one: Callable[[int], Waiting], had: dict[str, float]
) -> Iterator[Waiting]:
    """Those who wait as `fair` takes them: the first of whoever has had least, whose tokens are
    added to what he has had. owners: keys by owner, in the order of coming; one: who has a key."""
    queues = {owner: iter(keys) for owner, keys in owners.items()}
    heads = {owner: next(keys) for owner, keys in queues.items()}
    while heads:
        owner = min(heads, key=lambda each: (had.get(each, 0.0), heads[each]))
        found = one(heads[owner])
        had[owner] = had.get(owner, 0.0) + found.tokens
        yield found
        heads[owner] = next(queues[owner], -1)
        if heads[owner] < 0:
            del heads[owner]


def in_time(policy: Policy, view: View) -> Step:
    """What a policy says, but where somebody's next token would be later than is promised: a step
    that leaves him out, and a token of each behind it, end after that, or it interrupts one who
    draws. Then everybody's next token and slices of prompts, as mixed."""
    fed = policy(view)
    if view.slo.tpot == math.inf:
        return fed
    left = [key for key in view.drawing if not fed.get(key)]
    if not left:
        return fed
    begin = sum(count > 0 and key not in view.going for key, count in fed.items())
    due = min(_due(view.going[key], view.slo) for key in left)
    if begin > max(0, view.free) or view.now + view.slowest * _until_all(view, fed) > due:
        return mixed(view)
    return fed


def _until_all(view: View, fed: Step) -> float:
    """Seconds of a step, and of one behind it that feeds a token of each who draws."""
    price, going = view.price, view.going
    some = [
        (going[key].start if key in going else view.queue[key].start, count, True)
        for key, count in fed.items()
        if count
    ]
    each = [(going[key].start, 1, True) for key in view.drawing]
    return price.step(*price.seen(some)) + price.step(*price.seen(each))


def _tokens(view: View, key: int) -> int:
    return view.going[key].tokens if key in view.going else view.queue[key].tokens


def _drawing(view: View) -> Step:
    """Everybody's next token."""
    return dict.fromkeys(view.drawing, 1)


def _prompts(view: View) -> Iterable[tuple[int, int]]:
    """Those whose prompt is not through, and its tokens."""
    return _together(view, [key for key in view.going if key not in view.drawing])


def _together(view: View, keys: Iterable[int]) -> Iterable[tuple[int, int]]:
    """Some that have begun and all that have not, in the order of coming, and what they wait
    for."""
    begun = [(key, view.going[key].tokens) for key in keys]
    queue = ((one.key, one.tokens) for one in view.queue)
    return heapq.merge(begun, queue) if begun else queue


def _slices(view: View, order: Iterable[tuple[int, int]], left: int, most: int = 1 << 40) -> Step:
    """Of `most` requests in this order, what they wait for, as far as tokens and slots last."""
    fed, slots = dict[int, int](), view.free
    for key, tokens in order if left > 0 else ():
        begun = key in view.going
        if left <= 0 or (not begun and slots <= 0) or len(fed) == most:
            break
        fed[key] = min(tokens, left)
        left -= fed[key]
        slots -= not begun
    return fed


def _in_turn(view: View, fed: Step) -> Step:
    """Who came first is the most urgent, but for who has not begun: he takes from nobody."""
    going = {key: fed.get(key, 0) for key in view.going}
    return going | {key: count for key, count in fed.items() if key not in going}


# With all slots taken and everybody drawing, these feed a token of each, whatever the clock says.
PATIENT = frozenset((first_come, prompt_first, mixed, decode_maximal, fixed, deadline, fair))


class Slicing(NamedTuple):
    """Of a policy that, with one prompt begun and not through, and everybody else drawing, feeds
    the next token of each and of the prompt what is left of a step. tokens: of such a step, by the
    price and the budget; overtaken: whether who waits for a slot may be fed before the prompt
    though he came later; alone: whether nothing of another prompt is fed in what it leaves; shared:
    whether prompts that wait are taken by turns of those who ask."""

    tokens: Callable[[Price, int], int] = _whole
    overtaken: bool = False
    alone: bool = False
    shared: bool = False


SLICING: Mapping[Policy, Slicing] = MappingProxyType({
    mixed: Slicing(), decode_maximal: Slicing(alone=True), fixed: Slicing(_enough),
    fair: Slicing(shared=True), deadline: Slicing(overtaken=True),
})  # fmt: skip
for _name, _policy in (
    ("first-come", first_come), ("prompt-first", prompt_first), ("mixed", mixed),
    ("decode-maximal", decode_maximal), ("fixed", fixed), ("feedback", feedback),
    ("deadline", deadline), ("fair", fair),
):  # fmt: skip
    POLICIES.add(_name, _policy)
