"""Random settings of serving, one a seed: requests, a room for them, a policy, drafts, weights in
files, a precision; of a given model, or of small ones of every family."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

import torch

from outsize.checkpoint import adapters
from outsize.collectives import Mesh
from outsize.decode.caches import CACHES
from outsize.decode.samplers import Sampling
from outsize.errors import OutsizeError
from outsize.kernels import native
from outsize.kernels.pages import AS_STORED, FORMS
from outsize.models.build import build
from outsize.models.config import DecoderConfig
from outsize.models.decoder import Decoder, typed
from outsize.models.families import parse
from outsize.models.seams import StateSpec
from outsize.serve.asks import Ask, Room
from outsize.serve.lying import page_of
from outsize.serve.meshed import check_mesh
from outsize.serve.policies import POLICIES
from outsize.serve.price import Curve, Price
from outsize.serve.room import positions_of
from outsize.verify.draw import ATTEMPTS, Values
from outsize.verify.shapes import shape

EXACT = "float64"
ONE = Mesh()
_MESHES = ONE, ONE, Mesh(pipeline=2), Mesh(tensor=2), Mesh(pipeline=2, tensor=2)
LONGEST = 70  # tokens of a prompt: more than a tile of attention
NEW = 12  # tokens that follow it at most
QUEUE = 1 << 20  # nobody is refused
_PRECISIONS = (EXACT, "float32", "float32", "bfloat16")


@dataclass(frozen=True)
class Subject:
    """What is served. directory: of its files, where it has such; config: of the model."""

    config: DecoderConfig
    directory: Path | None = None

    def model(self, dtype: torch.dtype) -> Decoder:
        """In memory; from random values where there are no weights."""
        if self.directory is not None:
            return adapters.load(self.directory, dtype, config=self.config)
        made, fill = build(self.config, 0, dtype), Values(self.config)()
        with torch.no_grad():
            for name, parameter in made.named_parameters():
                fill(name, parameter)
        return made

    @property
    def exact(self) -> bool:
        """Whether a request's bits are its own below float64."""
        left = self.left(torch.float32)
        return native.library() is not None and all(one.per == "token" for one in left)

    def left(self, dtype: torch.dtype) -> list[StateSpec]:
        """What layers keep of tokens."""
        with torch.device("meta"):
            blocks = typed(Decoder(self.config).blocks)
        return [one for block in blocks for one in block.mixer.states(dtype)]


@dataclass(frozen=True)
class Setting:
    """A draw. draft: "" for none; below: of the weights' bytes, what --memory gives, 0: no limit;
    late: the tokens of the first request behind which each is asked, 0: before the first step;
    fails: moves of pages behind which what lies below them fails, 0: none;
    cancelled: the tokens behind which a request goes, 0: it stays; mesh: of its workers, here
    threads."""

    seed: int
    subject: Subject
    precision: str
    room: Room
    policy: str
    draft: str
    below: float
    asks: tuple[Ask, ...]
    late: tuple[int, ...]
    cancelled: tuple[int, ...]
    mesh: Mesh = ONE
    fails: int = 0

    def __str__(self) -> str:
        room, asks = self.room, self.asks
        said = [
            f"{self.subject.config.family} in {self.precision}",
            f"pages {room.pages} of {room.page}, slots {room.slots}, budget {room.budget}",
            f"policy {self.policy}",
            f"prompts {', '.join(str(len(one.ids)) for one in asks)}",
            f"new {', '.join(str(one.max_new_tokens) for one in asks)}",
            f"cache {room.cache}" * (room.cache != AS_STORED),
            f"cache {room.lies}" * bool(room.lies),
            f"draft {self.draft}" * bool(self.draft),
            f"{room.below} pages below" * bool(room.below),
            f"which fail behind {self.fails} moves" * bool(self.fails),
            f"on {self.mesh}" * (self.mesh.size > 1),
            f"memory {self.below:.2f} of the weights" * bool(self.below),
            f"asked behind {self.late}" * any(self.late),
            f"cancelled behind {self.cancelled}" * any(self.cancelled),
        ]
        return ", ".join(filter(None, said))


def needed(ask: Ask) -> int:
    """Tokens that a request has pages for."""
    return len(ask.ids) + ask.max_new_tokens - 1


def features(setting: Setting) -> Iterator[str]:
    """What it has, by name."""
    yield f"model {setting.subject.config.family}"
    yield f"precision {setting.precision}"
    yield f"policy {setting.policy}"
    for name, has in (
        (f"draft {setting.draft}", setting.draft),
        (f"mesh {setting.mesh}", setting.mesh.size > 1),
        (f"cache {setting.room.cache}", setting.room.cache != AS_STORED),
        (f"cache {setting.room.lies}", setting.room.lies),
        ("memory below the weights", setting.below),
        ("pages below", setting.room.below),
        ("pages below that fail", setting.fails),
        ("interrupted", setting.room.pages * setting.room.page < sum(map(needed, setting.asks))),
        ("prompts in slices", setting.room.budget < max(len(one.ids) for one in setting.asks)),
        ("few slots", setting.room.slots < len(setting.asks)),
        ("asked late", any(setting.late)),
        ("cancelled", any(setting.cancelled)),
    ):
        if has:
            yield name


# -- drawing ---------------------------------------------------------------------------------------


def subject_of(target: str | None) -> Subject | None:
    """A run's or a model's directory, or a config.json; None where nothing is named: each draw
    then has a small model of its own. OutsizeError where there is no such."""
    if target is None:
        return None
    path = Path(target)
    if path.is_file():
        try:
            return Subject(parse(json.loads(path.read_text(encoding="utf-8"))))
        except ValueError as error:
            raise OutsizeError(f"{path}: {error}; expected a model's config.json") from None
    found = adapters.model_directory(path)
    return Subject(adapters.read_config(found), found)


def drawn(seed: int, subject: Subject | None, precision: str | None = None) -> Setting:
    """The draw of a seed. precision: that of the model; None draws it."""
    draw = Random(f"{seed} serve")
    subject = subject or _small(draw)
    chosen = draw.choice(_PRECISIONS)
    chosen = precision or (chosen if subject.exact else EXACT)
    asks = tuple(_asks(draw, subject.config))
    context = max(map(needed, asks)) + subject.config.virtual
    page = draw.choice((1, 3, 4, 16, 16, 64))
    least = -(-context // page)
    every = sum(-(-(needed(one) + subject.config.virtual) // page) for one in asks)
    pages = draw.choice((least, least + draw.randrange(3), every + 1))
    slots = draw.randrange(1, len(asks) + 2)
    budget = slots + draw.choice((0, 1, 5, 30, 200))
    late = tuple(draw.choice((0, 0, 1, 3)) if n else 0 for n in range(len(asks)))
    made = Setting(
        seed,
        subject,
        chosen,
        Room(pages, page, slots, budget, QUEUE, context),
        draw.choice(POLICIES.names()),
        draw.choice(("", "", "lookup", "wrong")),
        draw.choice((0.0, 0.0, 0.0, 0.4, 0.8)),
        asks,
        tuple(min(one, asks[0].max_new_tokens) for one in late),
        tuple(draw.choice((0, 0, 0, 0, 2)) for _ in asks),
        _mesh(Random(f"{seed} ranks"), subject.config),
    )
    made = _with_below(Random(f"{seed} below"), made)
    cache = draw.choice((*(AS_STORED,) * 4, *FORMS))
    if chosen != EXACT:  # by codes, rounding elsewhere would show
        made = replace(made, room=replace(made.room, cache=cache))
    return _lying(Random(f"{seed} lies"), made)


def _lying(draw: Random, made: Setting) -> Setting:
    """Of one worker, with nothing below, as another cache than pages lies, now and then: of about
    as many tokens."""
    lies = draw.choice(("", *CACHES.names()))
    room = made.room
    if not lies or made.mesh.size > 1 or room.below:
        return made
    left = made.subject.left(getattr(torch, made.precision))
    page = page_of(lies, left, FORMS[room.cache])
    pages = max(-(-room.context // page), room.pages * room.page // page)
    return replace(made, room=replace(room, lies=lies, page=page, pages=pages))


def _with_below(draw: Random, made: Setting) -> Setting:
    """Of one worker, with few pages and some below that are sooner back than computed, now and
    then."""
    below = draw.choice((0, 1, 5, 1000))
    if not below or made.mesh.size > 1:
        return made
    price = Price(Curve(((1, 1e-3),)), fetch=0.0)
    pages = min(made.room.pages, -(-made.room.context // made.room.page) + 1)
    room = replace(made.room, pages=pages, below=below, price=price)
    return replace(made, room=room, fails=draw.choice((0, 0, 3, 9)))


def _mesh(draw: Random, config: DecoderConfig) -> Mesh:
    """One that the model fits on."""
    found = draw.choice(_MESHES)
    try:
        check_mesh(config, found)
    except OutsizeError:
        return ONE
    return found


def _small(draw: Random) -> Subject:
    """Some small model of any family."""
    for _ in range(ATTEMPTS):
        try:
            return Subject(parse(shape(draw)))
        except OutsizeError:
            continue  # sizes that the family does not have
    raise OutsizeError(f"verify: none of {ATTEMPTS} drawn models is one that is supported")


def _asks(draw: Random, config: DecoderConfig) -> Iterator[Ask]:
    """Prompts of many lengths, some of which begin alike, and some that repeat themselves."""
    room = LONGEST + NEW
    if (positions := positions_of(config)) is not None:
        room = min(room, positions - config.virtual)
    vocab, most = config.vocab, max(1, room - NEW)
    text = [draw.randrange(vocab) for _ in range(most)]
    for number in range(draw.randrange(2, 7)):
        length = min(most, draw.choice((1, 2, 17, 40, 64, draw.randrange(1, LONGEST + 1))))
        ids = text[:length]
        if draw.random() < 0.4:
            ids = [draw.randrange(vocab) for _ in range(length)]
        elif draw.random() < 0.3:
            ids = (text[:5] * length)[:length]
        sampling = Sampling(
            draw.choice((0.0, 0.0, 0.7, 1.3)), draw.choice((None, None, 5)),
            draw.choice((1.0, 1.0, 0.8)), number,
        )  # fmt: skip
        stop = frozenset({draw.randrange(vocab)} if draw.random() < 0.2 else ())
        new = draw.randrange(1, min(NEW, room - length + 1) + 1)
        yield Ask(tuple(ids), new, sampling, stop, draw.randrange(3))
