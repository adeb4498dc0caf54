"""What every test gets: one thread, fixed seeds, no network, its own cache directory.

The environment is set before anything imports torch or transformers, and is inherited by the
processes that tests start.
"""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["OMP_NUM_THREADS"] = "1"  # tiny models: threads only cost, and give other sums

import fcntl
import gc
import importlib
import random
import shutil
import socket
import tempfile
import time
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest
import torch
from openmp import let_threads_go
from rates import known_machine
from remembered import remember
from trials import shorten

from outsize.collectives import threads
from outsize.hardware.probe import keep
from outsize.kernels import native
from outsize.launch import fingerprint

# The same examples on every machine, and no verdict by the clock of a busy one.
hypothesis.settings.register_profile(
    "outsize", deadline=None, derandomize=True, database=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)  # fmt: skip
hypothesis.settings.load_profile("outsize")

# What is imported lives as long as the session; thousands of short tests make little waste.
gc.disable()  # while tests are found
gc.set_threshold(50_000, 20, 100)

fingerprint.code()  # of the sources: commands and workers that tests fork would each find it out
shorten()
threads.WAIT = 120.0  # seconds: a test that hangs says so before its run is given up

LOOPBACK = ("127.", "::1", "localhost")


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Of two processes one looks through folders from their ends: each rewrites the assertions of
    half of the files (8 s of all of them), and reads what the other has written of the rest."""
    report = yield
    if os.environ.get("PYTEST_XDIST_WORKER") == "gw1" and isinstance(collector, pytest.Dir):
        report.result.reverse()
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All processes have tests in one order."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        items.sort(key=lambda item: item.path.parts)


def pytest_collection_finish() -> None:
    """Tests and what they import live as long: who collects garbage, each fork too, looks at none
    of these half a million objects (0.4 s)."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def _same_start() -> Iterator[None]:
    """Seeds, thread count and torch's global settings are the same at the start of every test."""
    random.seed(0)
    np.random.seed(0)
    torch.default_generator.manual_seed(0)
    if torch.cuda.is_available():  # without, each seeding of it formats and keeps a traceback
        torch.cuda.manual_seed_all(0)
    torch.set_num_threads(1)
    yield
    torch.set_default_dtype(torch.float32)
    if torch.are_deterministic_algorithms_enabled():
        torch.use_deterministic_algorithms(False)
    torch.set_grad_enabled(True)
    let_threads_go()  # workers of later tests are forked from this process


@pytest.fixture(scope="session")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the compiled kernels: who comes first builds them for the whole session, or
    takes those that this person has: their names say of what they were built, their ends that they
    are whole."""
    base = tmp_path_factory.getbasetemp()
    own = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "outsize" / "kernels"
    folder = base.parent / "kernels"
    folder.mkdir(exist_ok=True)
    (base / "first" / "outsize").mkdir(parents=True)
    (base / "first" / "outsize" / "kernels").symlink_to(folder)
    with pytest.MonkeyPatch.context() as patch, (base.parent / "building").open("w") as lock:
        patch.setenv("XDG_CACHE_HOME", str(base / "first"))
        fcntl.flock(lock, fcntl.LOCK_EX)
        for library in own.glob("native-*.so"):
            if not (folder / library.name).exists():
                shutil.copy(library, folder)
        found = native.library()
        if found is not None:
            found.libraries.opened(*native._LIBRARIES)
    return folder


@pytest.fixture(autouse=True)
def _own_cache(
    tmp_path_factory: pytest.TempPathFactory,
    kernels: Path,
    rates_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Caches of one test are seen neither by another test nor by the person who runs them."""
    base = tmp_path_factory.getbasetemp()
    cache = Path(tempfile.mkdtemp(prefix="cache-", dir=base))  # mktemp lists all others each time
    (cache / "outsize").mkdir()
    (cache / "outsize" / "kernels").symlink_to(kernels)
    for file in rates_folder.iterdir():
        shutil.copyfile(file, cache / "outsize" / file.name)
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))


@pytest.fixture(scope="session")
def rates_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with this machine's rates, known: to measure them takes seconds, in every process
    of a test."""
    folder = tmp_path_factory.mktemp("rates")
    keep(known_machine(), cache=folder)
    return folder


@pytest.fixture(autouse=True, scope="session")
def rehearsed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """What one search has rehearsed, the next one knows, in any process of this session."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "rehearsed"
    folder.mkdir(exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        remember(folder, patch)
        yield folder


@pytest.fixture(scope="session")
def known_times() -> dict[str, Any]:
    return {}


@pytest.fixture
def timed_once(monkeypatch: pytest.MonkeyPatch, known_times: dict[str, Any]) -> None:
    """Runs of one worker whose blocks are those of a run before, under the same plan, have its
    times. A test with a clock of its own takes its own."""
    module = importlib.import_module("outsize.simulate.calibrate")  # not the function of its name
    plain, clock = module.timed, time.perf_counter

    def timed(chosen: Any, recipe: Any, batch_of: Any, here: Any, *rest: Any) -> Any:
        if time.perf_counter is not clock:
            return plain(chosen, recipe, batch_of, here, *rest)
        key = repr((chosen, recipe, rest, here.stores.keys(), here.world.mesh))
        if key not in known_times:
            known_times[key] = plain(chosen, recipe, batch_of, here, *rest)
        return known_times[key]

    monkeypatch.setattr(module, "timed", timed)


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection to anything but this machine fails at once, naming the address."""
    connect, connect_ex = socket.socket.connect, socket.socket.connect_ex

    def refuse_far(sock: socket.socket, address: Any) -> None:
        near = sock.family == socket.AF_UNIX or str(address[0]).startswith(LOOPBACK)
        if not near:
            raise OSError(f"a test tried to reach {address!r}; tests run without a network")

    def guarded(sock: socket.socket, address: Any) -> None:
        refuse_far(sock, address)
        connect(sock, address)

    def guarded_ex(sock: socket.socket, address: Any) -> int:
        refuse_far(sock, address)
        return connect_ex(sock, address)

    monkeypatch.setattr(socket.socket, "connect", guarded)
    monkeypatch.setattr(socket.socket, "connect_ex", guarded_ex)


@pytest.fixture
def tiny_config() -> dict[str, Any]:
    """config.json of a Llama of about 35 thousand parameters; a fresh dict for each test."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 256,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "hidden_act": "silu",
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "initializer_range": 0.02,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "torch_dtype": "float32",
    }
