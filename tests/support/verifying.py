"""Small cases for `verify`: a family, a plan, ragged documents, a row without targets."""

from __future__ import annotations

import plain
from subjects import SEQUENCE, VOCAB, base_plan, config_of

from outsize.models.random import fill_normal
from outsize.optim import AdamW
from outsize.verify import Case, Native


def fill(name, out) -> None:
    """No special values anywhere."""
    fill_normal(out, 3, name, std=0.2)
    if out.dim() == 1:
        out.add_(1)


def native(family: str, changes, **options) -> Native:
    return Native(config_of(family, **changes), lambda: fill, **options)


def case_of(
    family: str = "llama, untied", optimizer=None, clip=None, steps=2, resume_at=0, noise=None,
    named="float64", options=None, frozen=None, changes=None, **plan,
) -> Case:  # fmt: skip
    """plan: what differs from a row a microbatch, a stage a segment. noise: dropout by step.
    changes: keys of the family's configuration."""
    made = base_plan(named, **plan)
    data = plain.batches(steps, made.rows, SEQUENCE, VOCAB)

    def batch(step):
        return data[step] if noise is None else noise(data[step], step)

    given = {} if options is None else {"options": options}
    given |= {} if frozen is None else {"frozen": frozen}
    optimizer = optimizer or AdamW(1e-2, eps=1e-4)
    return Case(
        native(family, changes or {}, **given),
        made,
        optimizer,
        batch,
        steps,
        clip,
        resume_at=resume_at,
    )
