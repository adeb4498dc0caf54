"""Pulses in shared memory are read as they were written, by another process too."""

from __future__ import annotations

import os
import signal
import threading
import time

from outsize.launch.board import TEXT, Board, Place, Spot, memory, read


def test_what_a_forked_worker_writes_is_read_here() -> None:
    shared = memory(2)
    assert str(read(shared, 1)) == "starting" and read(shared, 1).waits is None
    begin = time.monotonic()
    pid = os.fork()
    if pid == 0:
        board = Board(shared, 1)
        board.during("step 3")
        board.at("FORWARD 1 0")
        board.wait("all_reduce with ranks 0, 1")
        os._exit(0)
    os.waitpid(pid, 0)
    place = read(shared, 1)
    assert str(place) == "step 3, FORWARD 1 0"
    assert place.waits is not None and place.waits.waits == "all_reduce with ranks 0, 1"
    assert begin <= place.waits.since <= time.monotonic()
    assert read(shared, 0).spots == ()
    spots = Spot("FETCH 1", "", 1.0), Spot("NORM", "all_reduce", 5.0), Spot("GATHER", "gather", 3.0)
    assert Place("step 3", spots).waits == spots[2], "who has waited longest"


def test_every_thread_has_a_place_and_threads_of_one_name_share_it() -> None:
    shared = memory(1)
    board = Board(shared, 0)

    def lane(action: str) -> None:
        board.at(action)
        board.wait("all_gather")
        board.go()

    for action in ("GATHER 0", "GATHER 1"):
        thread = threading.Thread(target=lane, args=(action,), name="lane network")
        thread.start()
        thread.join()
    board.at("FORWARD 0 0")
    place = read(shared, 0)
    assert [spot.action for spot in place.spots] == ["FORWARD 0 0", "GATHER 1"]
    assert place.waits is None


def test_long_words_are_cut() -> None:
    shared = memory(1)
    board = Board(shared, 0)
    board.at("x" * 1000)
    board.wait("é" * 1000)
    (spot,) = read(shared, 0).spots
    assert spot.action == "x" * TEXT and spot.waits == "é" * (TEXT // 2)


def test_a_reader_never_sees_half_a_change() -> None:
    shared = memory(1)
    board = Board(shared, 0)
    pid = os.fork()
    if pid == 0:
        while True:
            for letter in "abcdef":
                board.at(letter * 100)
    try:
        for turn in range(40):
            os.kill(pid, signal.SIGSTOP if turn % 2 else signal.SIGCONT)
            for _ in range(100):
                for spot in read(shared, 0).spots:
                    assert len(set(spot.action)) <= 1
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
