"""The store against what can happen to it: kills at every file operation, full and read-only disks,
flipped and missing bytes, a second run. Its files are read back with the safetensors library."""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import os
import re
import shutil
import signal
import subprocess
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

from outsize.checkpoint import hub
from outsize.checkpoint.manifest import MANIFEST_NAME, decode, safe_path
from outsize.checkpoint.opened import DamageError
from outsize.checkpoint.store import Store
from outsize.checkpoint.writing import Later
from outsize.errors import OutsizeError

Named = tuple[str, str, Tensor]


def _tensors(step: int) -> list[Named]:
    """What a run saves: other values at every step; several dtypes, shapes and groups."""
    seeded = torch.Generator().manual_seed(step)
    w = torch.randn(33, 17, generator=seeded)
    return [
        ("weights", "model.embed.weight", w.to(torch.bfloat16)),
        ("optimizer", "exp_avg/embed", w * 2),
        ("weights", "model.norm.weight", w[0].clone()),
        ("optimizer", "exp_avg_sq/embed", w.t()),  # not contiguous
        ("optimizer", "step", torch.tensor(step)),
        ("weights", "model.none", torch.empty(0, 4, dtype=torch.float64)),
    ]


def _config(directory: Path) -> None:
    (directory / "config.json").write_text('{"model_type": "llama"}\n')
    (directory / "inner").mkdir()
    (directory / "inner" / "words.txt").write_text("a b c\n")


def _save(store: Store, step: int) -> Path:
    return store.save(step, _tensors(step), {"step": step, "cursor": [1, 2.5, None]}, _config)


def _assert_holds(directory: Path, step: int | None = None, expected: int = 0) -> None:
    """The checkpoint that loads from `directory` is that of step `expected`, to the bit."""
    found = Store(directory).load(step)
    found.verify()
    assert found.step == found.meta["step"] == expected
    for group, name, tensor in _tensors(expected):
        assert torch.equal(found.tensor(group, name), tensor), name


@pytest.fixture
def saved(tmp_path: Path) -> Iterator[Path]:
    """A directory with checkpoints of steps 1 and 2."""
    with Store(tmp_path / "run") as store:
        _save(store, 1)
        _save(store, 2)
    yield tmp_path / "run"


# --- what is saved --------------------------------------------------------------------------------


def test_roundtrip(saved: Path) -> None:
    _assert_holds(saved, expected=2)
    _assert_holds(saved, 1, expected=1)
    found = Store(saved).load()
    assert found.meta == {"step": 2, "cursor": [1, 2.5, None]}
    assert {group for group, _ in found.places} == {"weights", "optimizer"}
    assert found.names("optimizer") == ("exp_avg/embed", "exp_avg_sq/embed", "step")
    assert found.names("nothing") == ()
    assert found.entry("optimizer", "exp_avg_sq/embed").shape == (17, 33)
    out = torch.zeros(17, 33, dtype=torch.float64).t()
    assert found.tensor("weights", "model.embed.weight", out) is out
    assert torch.equal(out, _tensors(2)[0][2].double())
    assert (saved / "latest").read_text() == "step-00000002\n"
    assert sorted(os.listdir(saved)) == [".lock", "latest", "step-00000001", "step-00000002"]


def test_the_files_are_those_that_others_read(saved: Path) -> None:
    directory = saved / "step-00000002"
    listed = [str(p.relative_to(directory)) for p in directory.rglob("*") if p.is_file()]
    assert sorted(listed) == [
        "config.json",
        "inner/words.txt",
        "manifest.json",
        "model.safetensors",
        "optimizer.safetensors",
    ]
    for group, file in (("weights", "model"), ("optimizer", "optimizer")):
        read = load_file(directory / f"{file}.safetensors")
        expected = {name: tensor for found, name, tensor in _tensors(2) if found == group}
        assert read.keys() == expected.keys()
        assert all(torch.equal(read[name], tensor) for name, tensor in expected.items())


def test_the_manifest_has_the_checksum_of_every_file_and_tensor(saved: Path) -> None:
    directory = saved / "step-00000002"
    files = json.loads((directory / MANIFEST_NAME).read_bytes())["manifest"]["files"]
    others = {str(p.relative_to(directory)) for p in directory.rglob("*") if p.is_file()}
    assert files.keys() == others - {MANIFEST_NAME}
    for path, entry in files.items():
        data = (directory / path).read_bytes()
        assert entry["bytes"] == len(data)
        if "group" not in entry:
            assert entry["crc32"] == f"{zlib.crc32(data):08x}"
            continue
        head = 8 + int.from_bytes(data[:8], "little")
        assert entry["header_crc32"] == f"{zlib.crc32(data[:head]):08x}"
        spans = {
            n: one["data_offsets"] for n, one in json.loads(data[8:head]).items() if n[0] != "_"
        }
        assert max(stop for _, stop in spans.values()) == len(data) - head
        for name, (start, stop) in spans.items():
            crc = zlib.crc32(data[head + start : head + stop])
            assert entry["tensors"][name]["crc32"] == f"{crc:08x}"
    sums = files["optimizer.safetensors"]["tensors"]
    data = _tensors(2)[3][2].contiguous().numpy().tobytes()
    expected = {"dtype": "F32", "shape": [17, 33], "bytes": len(data)}
    assert sums["exp_avg_sq/embed"] == expected | {"crc32": f"{zlib.crc32(data):08x}"}


def test_large_groups_are_cut_into_shards_with_an_index(tmp_path: Path) -> None:
    store = Store(tmp_path, shard_bytes=1150)
    path = _save(store, 0)
    _assert_holds(tmp_path, expected=0)
    index = json.loads((path / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == {
        "model.embed.weight": "model-00001-of-00002.safetensors",
        "model.norm.weight": "model-00002-of-00002.safetensors",
        "model.none": "model-00002-of-00002.safetensors",
    }
    assert index["metadata"]["total_size"] == 33 * 17 * 2 + 17 * 4
    shards = [name for name in os.listdir(path) if name.startswith("optimizer")]
    assert len(shards) == 3
    assert all(re.fullmatch(r"optimizer-0000[123]-of-00003\.safetensors", name) for name in shards)


@pytest.mark.parametrize("shard_bytes", [1 << 20, 4000])
def test_a_checkpoint_is_a_hugging_face_directory(tmp_path: Path, shard_bytes: int) -> None:
    config = transformers.LlamaConfig(
        vocab_size=40,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=32,
    )
    theirs = transformers.LlamaForCausalLM(config).double().eval()
    tensors = [("weights", name, tensor) for name, tensor in theirs.state_dict().items()]
    tensors += [("optimizer", name, tensor * 2) for _, name, tensor in tensors]
    path = Store(tmp_path, shard_bytes=shard_bytes).save(7, tensors, {}, config.save_pretrained)
    assert (path / "model.safetensors").exists() == (shard_bytes > 4000)
    ids = torch.arange(10)[None]
    with torch.no_grad():
        expected = theirs(ids).logits
        again = transformers.LlamaForCausalLM.from_pretrained(path, dtype=torch.float64)
        for name, tensor in again.state_dict().items():
            assert torch.equal(tensor, theirs.state_dict()[name]), name
        # Mapped tensors begin at other addresses, and products may round by that.
        torch.testing.assert_close(again(ids).logits, expected, rtol=1e-12, atol=1e-14)
        theirs.save_pretrained(tmp_path / "plain")
        ours, plain = (hub.load(p, dtype=torch.float64) for p in (path, tmp_path / "plain"))
        for name, tensor in ours.state_dict().items():
            assert torch.equal(tensor, plain.state_dict()[name]), name
        torch.testing.assert_close(ours(ids), plain(ids), rtol=1e-12, atol=1e-14)


def test_tensors_are_let_go_shard_by_shard(tmp_path: Path) -> None:
    alive: list[int] = []

    def made() -> Iterator[Named]:
        import gc
        import weakref

        seen: list[weakref.ref[Tensor]] = []
        for index in range(12):
            tensor = torch.full((100,), float(index))
            seen.append(weakref.ref(tensor))
            yield "weights", f"w{index}", tensor
            del tensor
            gc.collect()
            alive.append(sum(ref() is not None for ref in seen))

    Store(tmp_path, shard_bytes=800).save(0, made(), {})
    assert max(alive) <= 3


def test_tensors_are_made_in_the_order_in_which_they_come(tmp_path: Path) -> None:
    """What several workers have parts of, all ask for in one order: the last weights too, which
    fill no file before one of the optimizer is full."""
    sizes = {"weights": (100, 100, 30), "optimizer": (90, 90, 90), "buffers": (1,)}
    names = [
        (group, f"{group}.{i}", n) for group, some in sizes.items() for i, n in enumerate(some)
    ]
    made = list[str]()

    def later(name: str, count: int) -> Later:
        return Later(torch.float32, (count,), lambda: made.append(name) or torch.zeros(count))

    with Store(tmp_path, shard_bytes=500) as store:
        store.save(1, ((group, name, later(name, n)) for group, name, n in names), {})
    assert made == [name for _, name, _ in names]


def test_what_json_cannot_hold_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    store = Store(tmp_path / "run")
    for meta in ({"a": {"b": float("nan")}}, {"a": {"b": {1: 2}}}, {"a": {"b": b"x"}}):
        with pytest.raises(OutsizeError, match=r"meta\['a'\]\['b'\] is .* expected what JSON"):
            store.save(0, [], meta)  # type: ignore[arg-type]
    assert not (tmp_path / "run").exists()


def test_an_unknown_dtype_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(OutsizeError, match=r"'z' of 'weights' has dtype torch.complex64"):
        Store(tmp_path).save(0, [("weights", "z", torch.zeros(2, dtype=torch.complex64))], {})
    assert os.listdir(tmp_path) == [".lock"]


# --- which is taken -------------------------------------------------------------------------------


def test_a_saved_step_is_never_saved_over(saved: Path) -> None:
    store = Store(saved)
    with pytest.raises(OutsizeError, match="step 2 is already saved"):
        store.save(2, [], {})
    _assert_holds(saved, expected=2)


def test_a_damaged_step_is_set_aside_by_its_successor(saved: Path) -> None:
    _flip(saved / "step-00000002" / "model.safetensors", -1)
    _save(Store(saved), 2)
    _assert_holds(saved, expected=2)
    assert (saved / "damaged-step-00000002-0" / MANIFEST_NAME).exists()


def test_without_a_valid_manifest_there_is_no_checkpoint(saved: Path) -> None:
    (saved / "step-00000003").mkdir()
    shutil.copytree(saved / "step-00000002", saved / "step-00000004")  # of another step
    (saved / "step-7").mkdir()
    (saved / "notes").mkdir()
    store = Store(saved)
    assert store.steps() == [1, 2]
    assert store.latest() == 2
    with pytest.raises(OutsizeError, match="holds step 2, not 4"):
        store.load(4)


def test_no_checkpoint_at_all(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for directory in (tmp_path, tmp_path / "absent", tmp_path / "file"):
        store = Store(directory)
        assert store.steps() == []
        assert store.latest() is None
        with pytest.raises(OutsizeError, match="no checkpoint in"):
            store.load()
    with Store(tmp_path) as store:
        _save(store, 5)
    with pytest.raises(OutsizeError, match=r"no checkpoint of step 4 in .* there are: 5"):
        Store(tmp_path).load(4)


@pytest.mark.parametrize(
    "pointer", [b"", b"\xff\x00garbage", b"../../etc\n", b"step-00000009\n", b"step-1\n", None]
)
def test_a_pointer_of_garbage_is_passed_over(saved: Path, pointer: bytes | None) -> None:
    (saved / "latest").unlink()
    if pointer is not None:
        (saved / "latest").write_bytes(pointer)
    assert Store(saved).latest() == 2
    _assert_holds(saved, expected=2)


def test_keep_last(tmp_path: Path) -> None:
    with Store(tmp_path, keep_last=2) as store:
        for step in (1, 5, 9):
            _save(store, step)
        assert store.steps() == [5, 9]
    assert sorted(os.listdir(tmp_path)) == [".lock", "latest", "step-00000005", "step-00000009"]
    with pytest.raises(OutsizeError, match="keep_last is 0"):
        Store(tmp_path, keep_last=0)


# --- damage ---------------------------------------------------------------------------------------


def _flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 0x10
    path.write_bytes(data)


def _drop(path: Path, _: int) -> None:
    path.unlink()


def _cut(path: Path, at: int) -> None:
    os.truncate(path, at % path.stat().st_size)


FILES = ("config.json", "inner/words.txt", "model.safetensors", "optimizer.safetensors")


@pytest.mark.parametrize("harm", [_flip, _drop, _cut])
@pytest.mark.parametrize("file", [*FILES, MANIFEST_NAME])
def test_damage_is_refused_and_the_one_before_taken(
    saved: Path, file: str, harm: Callable[[Path, int], None]
) -> None:
    path = saved / "step-00000002" / file
    whole, size = path.read_bytes(), path.stat().st_size
    for at in {0, 9, size // 3, size // 2, size - 1} if harm is not _drop else {0}:
        at = min(at, size - 1)
        harm(path, at)
        with pytest.raises(DamageError, match=re.escape(str(path))):
            Store(saved).load().verify()
        before = Store(saved).load(on_damage="previous")
        assert before.step == 1
        assert str(path) in before.passed_over[0]
        path.write_bytes(whole)
    _assert_holds(saved, expected=2)
    assert Store(saved).load(1, "previous").step == 1


def test_any_bit_of_a_tensor_and_of_a_manifest_counts(saved: Path) -> None:
    directory = saved / "step-00000002"
    header = (directory / "model.safetensors").read_bytes()
    start = 8 + int.from_bytes(header[:8], "little")
    for at in range(start, start + 4):
        for bit in range(8):
            data = bytearray(header)
            data[at] ^= 1 << bit
            (directory / "model.safetensors").write_bytes(data)
            with pytest.raises(DamageError, match=r"model.safetensors: tensor 'model"):
                Store(saved).load().verify()
    manifest = (directory / MANIFEST_NAME).read_bytes()
    for at in range(0, len(manifest), 3):
        data = bytearray(manifest)
        data[at] ^= 1 << (at % 8)
        (directory / MANIFEST_NAME).write_bytes(data)
        assert Store(saved).steps() == [1], f"byte {at} of the manifest"


def test_a_header_that_reads_well_but_is_another_is_refused(saved: Path) -> None:
    path = saved / "step-00000002" / "model.safetensors"
    path.write_bytes(path.read_bytes().replace(b'"pt"', b'"qt"'))
    with pytest.raises(DamageError, match=r"model\.safetensors is damaged: its header is not"):
        Store(saved).load()


def test_a_damaged_tensor_is_refused_while_it_is_read(saved: Path) -> None:
    _flip(saved / "step-00000002" / "optimizer.safetensors", -1)
    found = Store(saved).load()
    with pytest.raises(DamageError, match=r"optimizer\.safetensors: tensor '.*' is damaged"):
        for name in found.names("optimizer"):
            found.tensor("optimizer", name)
    for name in found.names("weights"):
        found.tensor("weights", name)


def test_the_refusal_says_what_to_do(saved: Path) -> None:
    (saved / "step-00000002" / "config.json").write_text("x")
    with pytest.raises(
        DamageError, match=r"config.json is damaged: 1 bytes, expected 24"
    ) as caught:
        Store(saved).load()
    assert "the one before, step 1" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_nothing_whole_left(saved: Path) -> None:
    for step in (1, 2):
        _flip(saved / f"step-0000000{step}" / "model.safetensors", -1)
    with pytest.raises(DamageError, match=r"no whole checkpoint left in .*002/.*001/"):
        Store(saved).load(on_damage="previous")


def test_tensors_of_another_model(saved: Path) -> None:
    found = Store(saved).load()
    with pytest.raises(OutsizeError, match="no tensor 'lm_head' among its 'weights'"):
        found.tensor("weights", "lm_head")
    with pytest.raises(OutsizeError, match=r"shape \(17,\), expected \(18,\)"):
        found.tensor("weights", "model.norm.weight", torch.empty(18))


def test_names_in_a_manifest_are_not_trusted_as_paths(saved: Path) -> None:
    for path in ("../x", "/etc/passwd", "a/../../b", "a//b", "", ".", "a\\b", "c:x", "a\nb", "\0"):
        assert not safe_path(path), path
    directory = saved / "step-00000002"
    manifest = json.loads((directory / MANIFEST_NAME).read_bytes())["manifest"]
    manifest["files"]["../../secret"] = manifest["files"]["config.json"]
    text = json.dumps(manifest, indent=1)  # forged with a right checksum
    data = f'{{"crc32": "{zlib.crc32(text.encode()):08x}",\n"manifest": {text}}}\n'.encode()
    with pytest.raises(Exception, match=r"'../../secret' is not the name of a file in it"):
        decode(data)
    (directory / MANIFEST_NAME).write_bytes(data)
    assert Store(saved).steps() == [1]


# --- kills ----------------------------------------------------------------------------------------

OPERATIONS = (
    *("open", "write", "pwrite", "fsync", "rename", "replace", "mkdir", "ftruncate", "rmdir"),
    *("unlink", "close"),
)


def _arm(fatal: int) -> None:
    """From here on this process is killed at a file operation: before it, or half through what it
    writes."""
    count = 0

    def wrap(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **more: Any) -> Any:
            nonlocal count
            count += 1
            if count == fatal:
                if name in ("write", "pwrite") and len(args[1]) > 1:
                    real(args[0], args[1][: len(args[1]) // 2], *args[2:])
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **more)

        return call

    for name in OPERATIONS:
        setattr(os, name, wrap(name, getattr(os, name)))


def _killed(directory: Path, fatal: int) -> bool:
    """Whether a process was killed at that operation of a save; it had fewer otherwise."""
    pid = os.fork()
    if pid == 0:
        try:
            store = Store(directory, keep_last=2, shard_bytes=4000)
            store.acquire()
            _arm(fatal)
            _save(store, 3)
            os._exit(0)
        finally:
            os._exit(1)
    ended = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert ended in (0, -signal.SIGKILL)
    return ended != 0


def test_kill_at_every_file_operation_of_a_save(tmp_path: Path) -> None:
    with Store(tmp_path / "two", keep_last=2) as store:
        _save(store, 1)
        _save(store, 2)
    outcomes, fatal, killed = set(), 0, True
    while killed:
        fatal += 1
        directory = tmp_path / f"kill-{fatal}"
        shutil.copytree(tmp_path / "two", directory)
        killed = _killed(directory, fatal)
        steps = Store(directory).steps()
        assert steps in ([1, 2], [1, 2, 3], [2, 3]), f"killed at operation {fatal}"
        assert Store(directory).load().step == steps[-1]
        for step in steps:  # what is half removed is not listed either
            _assert_holds(directory, step, expected=step)
        outcomes.add(steps[-1])
        with Store(directory, keep_last=2) as store:  # the run that goes on
            left = [name for name in os.listdir(directory) if name.startswith((".s", ".r", ".la"))]
            assert not left, f"killed at operation {fatal}: {left}"
            _save(store, steps[-1] + 1)
        _assert_holds(directory, expected=steps[-1] + 1)
        assert len(Store(directory).steps()) == 2
    assert outcomes == {2, 3} and fatal > 20


class _Disk:
    """What would be lost in a power cut: files and directories changed since they were synced."""

    def __init__(self, patch: pytest.MonkeyPatch, place: Path) -> None:
        self.place, self.dirty, self.known = place, set[int](), set[int]()
        self.moments: list[str] = []  # what was renamed in `place`, when all that it needs was kept
        for name in ("open", "write", "pwrite", "fsync", "rename", "replace", "mkdir"):
            patch.setattr(os, name, functools.partial(getattr(self, name), getattr(os, name)))

    def open(self, real: Any, path: Any, flags: int, *more: Any, **named: Any) -> int:
        descriptor: int = real(path, flags, *more, **named)
        if flags & os.O_CREAT:
            self.dirty |= {os.fstat(descriptor).st_ino, Path(path).parent.stat().st_ino}
        return descriptor

    def write(self, real: Any, descriptor: int, *more: Any) -> int:
        self.dirty.add(os.fstat(descriptor).st_ino)
        count: int = real(descriptor, *more)
        return count

    pwrite = write

    def fsync(self, real: Any, descriptor: int) -> None:
        self.dirty.discard(os.fstat(descriptor).st_ino)
        self.known.add(os.fstat(descriptor).st_ino)
        real(descriptor)

    def mkdir(self, real: Any, path: Any, *more: Any) -> None:
        real(path, *more)
        self.dirty |= {Path(path).stat().st_ino, Path(path).parent.stat().st_ino}

    def rename(self, real: Any, source: Any, target: Any) -> None:
        source, target = Path(source), Path(target)
        if target.parent == self.place:
            needed = {path.stat().st_ino for path in [source, *source.rglob("*")]}
            before = {self.place.stat().st_ino} if target.name == "latest" else set[int]()
            assert not needed & self.dirty, f"{target} is named before it is synced"
            assert needed <= self.known, f"{target} is named before all in it was synced"
            assert not before & self.dirty, "the pointer is set before what it points to is kept"
            self.moments.append(target.name)
        real(source, target)
        self.dirty |= {source.parent.stat().st_ino, target.parent.stat().st_ino}

    replace = rename


def test_what_has_a_name_would_outlive_a_power_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run").mkdir()
    disk = _Disk(monkeypatch, tmp_path / "run")
    _save(Store(tmp_path / "run", shard_bytes=1150), 1)
    assert disk.moments == ["step-00000001", "latest"]
    assert (tmp_path / "run").stat().st_ino not in disk.dirty


# --- a system that refuses ------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["open", "write", "pwrite", "fsync", "rename", "mkdir"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_an_error_at_any_file_operation_leaves_what_was(
    saved: Path, monkeypatch: pytest.MonkeyPatch, call: str, code: int
) -> None:
    real = getattr(os, call)
    for nth in range(100):
        left = nth

        def fail(*args: object, **more: object) -> object:
            nonlocal left
            left -= 1
            if left == -1:
                raise OSError(code, os.strerror(code), str(args[0]))
            return real(*args, **more)

        store = Store(saved)
        store.acquire()
        with monkeypatch.context() as patch:
            patch.setattr(os, call, fail)
            try:
                _save(store, 3)
            except OutsizeError as error:
                message = str(error)
            else:
                break  # it came through without an nth call
        store.release()
        assert os.strerror(code) in message
        assert "\n" not in message
        if Store(saved).steps() == [1, 2]:
            assert "the last checkpoint, step 2, is as it was" in message
            assert sorted(os.listdir(saved)) == [
                ".lock",
                "latest",
                *(f"step-0000000{i}" for i in (1, 2)),
            ]
            _assert_holds(saved, expected=2)
        else:  # the last sync failed: it is there, but perhaps not for long
            assert "step 3 is saved, but not safely" in message
            _assert_holds(saved, expected=3)
            shutil.rmtree(saved / "step-00000003")
            (saved / "latest").write_text("step-00000002\n")
    assert nth > 0


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    mounted: list[Path] = []

    def mount(options: str) -> Path:
        path = tmp_path / f"disk{len(mounted)}"
        path.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", options, "none", str(path)]
        if shutil.which("mount") is None or subprocess.run(command, capture_output=True).returncode:
            pytest.skip("mounting a tmpfs is not permitted here")
        mounted.append(path)
        return path

    yield mount
    for path in mounted:
        subprocess.run(["umount", str(path)], check=True)


def test_a_full_disk(small_disk: Callable[[str], Path]) -> None:
    disk = small_disk("size=256k")
    with Store(disk / "run") as store:
        _save(store, 1)
        big = [("optimizer", "moment", torch.ones(100_000))]
        with pytest.raises(OutsizeError, match=r"No space left on device.*step 1, is as it was"):
            store.save(2, big, {})
        assert sorted(os.listdir(disk / "run")) == [".lock", "latest", "step-00000001"]
        _assert_holds(disk / "run", expected=1)
        _save(store, 3)  # what fits goes on
    _assert_holds(disk / "run", expected=3)


def test_a_read_only_disk(small_disk: Callable[[str], Path]) -> None:
    disk = small_disk("ro,size=64k")
    with pytest.raises(OutsizeError, match=r"cannot keep checkpoints in .*Read-only file system"):
        Store(disk / "run").acquire()


def test_a_file_in_place_of_the_directory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(OutsizeError, match=r"cannot keep checkpoints in .* choose another"):
            _save(Store(path), 0)
    assert (tmp_path / "file").read_text() == "mine"


def test_an_interrupt_leaves_what_was(saved: Path) -> None:
    def interrupted() -> Iterator[Named]:
        yield _tensors(3)[0]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Store(saved).save(3, interrupted(), {})
    assert sorted(os.listdir(saved)) == [".lock", "latest", "step-00000001", "step-00000002"]


# --- two runs -------------------------------------------------------------------------------------


def test_two_stores_in_one_directory(saved: Path) -> None:
    with Store(saved) as first:
        with pytest.raises(OutsizeError, match=f"in use by process {os.getpid()};"):
            Store(saved).acquire()
        first.acquire()  # its own is no hindrance
        _assert_holds(saved, expected=2)  # readers need no lock
    with Store(saved):
        pass


def _holding(directory: Path) -> tuple[int, int]:
    """A process that holds a directory, and a helper that it forked, which outlives it."""
    told, say = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            store = Store(directory)
            store.acquire()
            if os.fork() == 0:
                # By itself: what a fork runs in a child is done by now.
                os.write(say, str(os.getpid()).encode())
            time.sleep(600)
        finally:
            os._exit(1)
    os.close(say)
    with os.fdopen(told) as reader:
        return pid, int(os.read(reader.fileno(), 20))


def test_a_killed_run_lets_go_of_its_directory(saved: Path) -> None:
    run, helper = _holding(saved)
    try:
        with pytest.raises(OutsizeError, match=f"in use by process {run}; expected one"):
            Store(saved).acquire()
        os.kill(run, signal.SIGKILL)
        os.waitpid(run, 0)
        with Store(saved) as store:
            _save(store, 3)
    finally:
        for pid in (run, helper):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    _assert_holds(saved, expected=3)


def test_only_our_own_rubbish_is_removed(saved: Path) -> None:
    ours = (".saving-00000003-77", ".removing-00000001-77", ".latest-00000003-77")
    theirs = (".saving", ".saving-3", "saving-00000003-77", ".latest", ".removing-x-1")
    for name in ours + theirs:
        (saved / name).mkdir()
        (saved / name / "file").write_text("")
    Store(saved).steps()
    assert all((saved / name).exists() for name in ours)  # reading removes nothing
    with Store(saved):
        assert not any((saved / name).exists() for name in ours)
        assert all((saved / name / "file").exists() for name in theirs)


def test_writing_needs_no_second_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bytes of a contiguous tensor go to the system from where they lie."""
    tensor = torch.arange(3 << 20, dtype=torch.float32)
    begin, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
    real, inside = os.pwrite, 0

    def pwrite(descriptor: int, view: memoryview | bytes, at: int) -> int:
        nonlocal inside
        own = isinstance(view, memoryview) and not view.readonly
        address = torch.frombuffer(view, dtype=torch.uint8).data_ptr() if own else 0
        inside += len(view) if begin <= address < end else 0
        return real(descriptor, view, at)

    monkeypatch.setattr(os, "pwrite", pwrite)
    Store(tmp_path).save(0, [("weights", "w", tensor)], {})
    assert inside == tensor.nbytes
