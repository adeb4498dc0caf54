"""Meeting through a store: torchrun's variables, attempts, and what goes wrong there."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from meetings import meet_twice, variables
from torch.distributed import HashStore, TCPStore
from torchrun import free_port, started

from outsize.collectives import Mesh, from_environment, join, meeting, shared
from outsize.collectives.c10d import over_gloo
from outsize.errors import OutsizeError


@pytest.fixture
def taken() -> Iterator[int]:
    """A port on which somebody listens."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


def test_keys_of_an_attempt_are_its_own() -> None:
    agent = TCPStore("127.0.0.1", 0, 1, True, timedelta(seconds=60), wait_for_workers=False)
    served = {"TORCHELASTIC_USE_AGENT_STORE": "True"}
    first, again, second = (
        meeting(variables(agent.port, TORCHELASTIC_RESTART_COUNT=attempt, **served))
        for attempt in ("0", "0", "1")
    )
    first.set("key", "stale")
    assert again.get("key") == b"stale"
    assert not second.check(["key"])


def test_a_run_of_one_joins_itself() -> None:
    world = from_environment(Mesh(), variables(free_port()))
    assert (world.rank, world.group((0,)).size) == (0, 1)
    world.close()


def test_a_process_may_join_again() -> None:
    """As two calls of `prepare` do: the second does not meet what the first has left."""
    agent = TCPStore("127.0.0.1", 0, 1, True, timedelta(seconds=60), wait_for_workers=False)
    assert started(meet_twice, 2, agent.port)() == [[3.0, 5.0], [3.0, 5.0]]


def test_a_port_in_use_is_named(taken: int) -> None:
    with pytest.raises(OutsizeError, match=f"rank 0 cannot serve .*127.0.0.1:{taken} .*MASTER_POR"):
        meeting(variables(taken), 2.0)


def test_an_unreachable_meeting_point_is_named() -> None:
    port = free_port()
    with pytest.raises(OutsizeError, match=f"rank 1 cannot reach .*127.0.0.1:{port} "):
        meeting(variables(port, RANK="1", WORLD_SIZE="2"), 1.0)


def test_who_does_not_come_is_named() -> None:
    with pytest.raises(OutsizeError, match="rank 0: rank 1 of 2 has not come"):
        join(Mesh(data=2), 0, HashStore(), patience=0.2)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"WORLD_SIZE": "3"}, "mesh data=2 has 2 workers, WORLD_SIZE is 3; start 2 workers"),
        ({"RANK": ""}, "RANK is ''; expected a number"),
        ({"MASTER_PORT": "http"}, "MASTER_PORT is 'http'; expected a number"),
    ],
)
def test_wrong_variables_are_named(wrong: dict[str, str], says: str) -> None:
    with pytest.raises(OutsizeError, match=says):
        from_environment(Mesh(data=2), variables(1, WORLD_SIZE="2") | wrong)


def test_a_group_without_this_worker_is_refused() -> None:
    world = join(Mesh(), 0, HashStore())
    with pytest.raises(OutsizeError, match=r"rank 0: a group of ranks \[0, 1\]"):
        world.group((0, 1))


def test_a_group_whose_others_do_not_connect_is_refused() -> None:
    with pytest.raises(OutsizeError, match=r"rank 5 cannot connect to ranks \[5, 7\]: "):
        over_gloo(HashStore(), 0, (5, 7), 0.3, "127.0.0.1")


def test_no_room_in_shared_memory_leaves_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared, "_slot", lambda size: 1 << 50)
    assert shared.over_memory(HashStore(), 0, (0, 1), [], 1.0) is None
    assert not list(Path("/dev/shm").glob(f"outsize-{os.getpid()}-*"))
