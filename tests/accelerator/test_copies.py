"""Copies and other waits: asynchronous from pinned memory alone, each wait counted by its line."""

from __future__ import annotations

import inspect

import pytest
import strict
import torch


def _here(before: int = 1) -> str:
    frame = inspect.currentframe()
    assert frame is not None and frame.f_back is not None
    return f"{__file__}:{frame.f_back.f_lineno - before}"


def test_waits_are_counted_by_the_line_that_made_them() -> None:
    strict.start("demand")
    x = torch.ones(4, device="strict")
    with strict.waits() as counted:
        x[0].item()
        item = _here()
        float(x[1])
        number = _here()
        for _ in range(3):
            x.cpu()
        copy = _here()
        torch.accelerator.synchronize()
        all_of_it = _here()
        x.nonzero()
        values = _here()
    assert counted == {
        ("item", item): 1,
        ("item", number): 1,
        ("blocking copy", copy): 3,
        ("synchronize", all_of_it): 1,
        ("operator aten::nonzero", values): 1,
    }


def test_copies_are_asynchronous_from_and_to_pinned_memory_alone() -> None:
    strict.start("demand")
    plain, pinned = torch.ones(4), torch.ones(4).pin_memory()
    assert pinned.is_pinned() and not plain.is_pinned() and pinned[1:].is_pinned()
    with strict.waits() as counted:
        x = pinned.to("strict", non_blocking=True)
        pinned.copy_(x, non_blocking=True)
        y = x.to("cpu", non_blocking=True)
    assert not counted and y.is_pinned() and strict.pieces_waiting() > 0
    with strict.waits() as counted:
        plain.to("strict", non_blocking=True)
        up = _here()
        plain.copy_(x, non_blocking=True)
        down = _here()
        x.copy_(pinned.double().pin_memory(), non_blocking=True)
        converted = _here()
    assert counted == {
        ("copy of unpinned memory", up): 1,
        ("copy of unpinned memory", down): 1,
        ("copy that must convert", converted): 1,
    }


def test_pinned_memory_is_given_again_when_its_copies_are_over() -> None:
    strict.start("demand")
    pinned = torch.ones(2000).pin_memory()
    at = pinned.data_ptr()
    x = pinned.to("strict", non_blocking=True)
    del pinned
    other = torch.full((2000,), 7.0).pin_memory()
    assert other.data_ptr() != at
    assert x.cpu().eq(1).all()
    assert torch.empty(2000, pin_memory=True).data_ptr() == at


def test_pinned_memory_has_a_limit() -> None:
    strict.start(pinned_bytes=1 << 20)
    with pytest.raises(RuntimeError, match=r"pinned memory .* 2097152 bytes asked for, 1048576 of"):
        torch.empty(1 << 21, dtype=torch.uint8, pin_memory=True)


def test_training_waits_for_its_batches_alone() -> None:
    strict.start("demand")
    model = torch.nn.Linear(8, 8, device="strict")
    optimizer = torch.optim.AdamW(model.parameters())
    batch = torch.ones(2, 8).pin_memory()
    with strict.waits() as counted:
        for _ in range(2):
            model(batch.to("strict", non_blocking=True)).square().mean().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    assert not counted
