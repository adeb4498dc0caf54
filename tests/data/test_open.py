"""open_data: split, duplicates, and the cache with what can happen to it."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import os
import shutil
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from forked import until

from outsize.data import Data, DataConfig, Dataset, FileTokenizer, open_data
from outsize.data import cache as cache_module
from outsize.data.files import SourceFile
from outsize.data.source import Given
from outsize.data.template import Template
from outsize.data.texts import TextSource
from outsize.errors import OutsizeError
from outsize.techniques.data.chat import Chat, ChatSource


def config(tmp_path: Path, **changes: object) -> DataConfig:
    made = DataConfig(path=str(tmp_path / "in"), cache=str(tmp_path / "cache"), validation=0.1)
    return dataclasses.replace(made, **changes)  # type: ignore[arg-type]


def write_lines(tmp_path: Path, texts: list[str], name: str = "d.jsonl") -> Path:
    path = tmp_path / "in" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def texts_of(data: Dataset) -> list[str]:
    found, begin = [], 0
    for end in data.ends.tolist():
        assert data.tokens_N[end - 1] == 256
        found.append(bytes(data.tokens_N[begin : end - 1].tolist()).decode())
        begin = end
    return found


def entries(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache").iterdir())


def same(left: Data, right: Data) -> bool:
    return all(
        np.array_equal(a.tokens_N, b.tokens_N)
        and np.array_equal(a.ends, b.ends)
        and a.fingerprint == b.fingerprint
        and a.bytes == b.bytes
        for a, b in ((left.train, right.train), (left.validation, right.validation))
    )


def built_again(tmp_path: Path, own: DataConfig) -> bool:
    calls: list[int] = []
    open_data(own, progress=lambda done, total: calls.append(done))
    return bool(calls)


def test_documents_are_split_once_each_without_duplicates(tmp_path: Path) -> None:
    texts = [f"document {number} €" for number in range(300)]
    write_lines(tmp_path, texts + texts[:40] + [""])
    data = open_data(config(tmp_path))
    train, validation = texts_of(data.train), texts_of(data.validation)
    assert sorted(train + validation) == sorted(texts)
    assert train == [text for text in texts if text in set(train)]  # the order of the file
    assert 15 <= len(validation) <= 50
    assert data.skipped.duplicates == 40 and data.skipped.empty == 1
    assert data.validation.bytes == sum(len(text.encode()) for text in validation)
    assert data.train.bytes == sum(len(text.encode()) for text in train)
    assert data.train.widths_N is None and data.validation.widths_N is not None
    assert int(data.validation.widths_N.sum()) == data.validation.bytes
    assert data.train.tokens_N.dtype == np.uint16


def test_the_split_is_the_content_s_and_only_grows_with_the_fraction(tmp_path: Path) -> None:
    texts = [f"document {number}" for number in range(300)]
    write_lines(tmp_path, texts)
    small = set(texts_of(open_data(config(tmp_path, validation=0.05)).validation))
    large = set(texts_of(open_data(config(tmp_path, validation=0.3)).validation))
    assert small < large
    shutil.rmtree(tmp_path / "in")
    write_lines(tmp_path, texts[150:][::-1], "other.jsonl")
    half = set(texts_of(open_data(config(tmp_path, validation=0.3)).validation))
    assert half == large & set(texts[150:])


def test_no_validation_when_none_is_wanted(tmp_path: Path) -> None:
    write_lines(tmp_path, ["one", "two"])
    data = open_data(config(tmp_path, validation=0.0))
    assert texts_of(data.train) == ["one", "two"] and data.validation.documents == 0


def test_few_text_files_hold_out_their_ends(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    lines = "".join(f"line {number:04}\n" for number in range(997))
    (tmp_path / "in" / "a.txt").write_text(lines)
    (tmp_path / "in" / "b.txt").write_text("x" * 100)
    data = open_data(config(tmp_path))
    (first, second), (tail, rest) = texts_of(data.train), texts_of(data.validation)
    assert first + tail == lines and first.endswith("\n")
    assert 987 < len(tail) <= 997  # a tenth, less what completes a line
    assert (second, rest) == ("x" * 90, "x" * 10)
    (tmp_path / "in" / "c.txt").write_text("y" * 100)
    data = open_data(config(tmp_path, validation=0.5))  # of one file and a half
    assert texts_of(data.train)[1:] == texts_of(data.validation)[1:] == ["x" * 50, "y" * 50]


def test_a_cache_entry_is_used_again_with_its_report(tmp_path: Path) -> None:
    path = write_lines(tmp_path, [f"document {number}" for number in range(50)])
    path.write_text("broken\n" + path.read_text())
    first = open_data(config(tmp_path))
    os.utime(path, (1, 1))  # small files are known by their content, not their date
    assert not built_again(tmp_path, config(tmp_path))
    second = open_data(config(tmp_path))
    assert same(first, second) and first.skipped == second.skipped
    assert second.skipped.skips[0].where == f"{path}:1"
    assert len(entries(tmp_path)) == 1


def test_whatever_decides_the_tokens_makes_another_entry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_lines(tmp_path, ["one", "two", "three"])
    base = config(tmp_path, validation=0.0)
    assert built_again(tmp_path, base)
    assert built_again(tmp_path, dataclasses.replace(base, validation=0.2))
    status = path.stat()
    path.write_text(path.read_text().replace("two", "owt"))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert built_again(tmp_path, base)  # same size, same date, other content
    monkeypatch.setattr(cache_module, "HASHED_BYTES", 0)
    assert built_again(tmp_path, base)
    os.utime(path, (1, 1))
    assert built_again(tmp_path, base)
    monkeypatch.setattr(cache_module, "VERSION", 99)
    assert built_again(tmp_path, base)
    assert not built_again(tmp_path, base)


def test_every_fact_of_a_source_is_in_its_key(tmp_path: Path) -> None:
    """Of files, tokenizer, split, fields and the settings of chats; one that is added later fails
    here until it is changed too."""
    for name in ("a", "b"):
        (tmp_path / name).write_text("xy")
    (tmp_path / "c").write_text("xyz")
    file = SourceFile(tmp_path / "a", "text", False, 2, 7)
    files = {
        "path": tmp_path / "b",
        "kind": "jsonl",
        "named": True,
        "size": 3,
        "packed": "gz",
        "part": 1,
    }
    said = {
        "files": ((), (file, file), *((dataclasses.replace(file, **{k: v}),)
                                      for k, v in files.items())),
        "tokenizer": (SimpleNamespace(fingerprint=lambda: "another"),),
        "fraction": (0.2,), "field": ("body",), "sequence": (8,),
    }  # fmt: skip
    given = Given((file,), 0, SimpleNamespace(fingerprint=lambda: "one"), None, 4, 0.1, "text")
    reported = {"ignored", "directory"}  # a count that is said; where the chats' template is from
    assert {f.name for f in dataclasses.fields(Given)} == {*said, *reported}
    assert {f.name for f in dataclasses.fields(SourceFile)} == {*files, "mtime"}
    template = Template("own", "{{ a }}", {"eos": "<e>"}, ())
    chats = {"settings": [Chat(field="talk"), Chat(long="leave"), Chat(form="alpaca")],
             "template": [
        dataclasses.replace(template, text="{{ b }}"),
        dataclasses.replace(template, special={"eos": "<f>"}),
    ]}  # fmt: skip
    for source, silent in ((TextSource(given), "sequence"),
                           (ChatSource(given, Chat(), template), "field")):  # fmt: skip
        others = [
            dataclasses.replace(source, given=dataclasses.replace(given, **{name: value}))
            for name, values in said.items()
            for value in values
            if name != silent
        ]
        if isinstance(source, ChatSource):
            others += [dataclasses.replace(source, **{n: v}) for n in chats for v in chats[n]]
        keys = [cache_module.key(one) for one in (source, *others)]
        assert len(set(keys)) == len(keys)
    with pytest.MonkeyPatch.context() as patch:  # files of which only the date is looked at
        patch.setattr(cache_module, "HASHED_BYTES", 0)
        later = dataclasses.replace(given, files=(dataclasses.replace(file, mtime=8),))
        assert cache_module.key(TextSource(given)) != cache_module.key(TextSource(later))


@pytest.mark.parametrize("damage", ["cut", "flip", "missing", "manifest", "not json", "a file"])
def test_a_damaged_entry_is_built_anew(tmp_path: Path, damage: str) -> None:
    write_lines(tmp_path, [f"document {number}" for number in range(50)])
    first = open_data(config(tmp_path))
    (entry,) = entries(tmp_path)
    wanted = [first.train.tokens_N.tolist(), first.validation.tokens_N.tolist()]
    tokens, manifest = entry / "train.tokens", entry / "manifest.json"
    if damage == "cut":
        tokens.write_bytes(tokens.read_bytes()[:-2])
    elif damage == "flip":
        content = bytearray(tokens.read_bytes())
        content[7] ^= 4
        tokens.unlink()
        tokens.write_bytes(content)
    elif damage == "missing":
        (entry / "validation.widths").unlink()
    elif damage == "manifest":
        manifest.write_text(manifest.read_text().replace("duplicates", "duplicatas"))
    elif damage == "not json":
        manifest.write_text("[]")
    else:
        shutil.rmtree(entry)
        entry.write_text("in the way")
    assert built_again(tmp_path, config(tmp_path))
    second = open_data(config(tmp_path))
    assert [second.train.tokens_N.tolist(), second.validation.tokens_N.tolist()] == wanted
    assert entries(tmp_path) == [entry]


def build(folder: Path, number: int) -> None:
    """What a process does that is ready: it opens the data and tells what it has."""
    (folder / f"ready{number}").touch()
    assert until((folder / "go").exists)
    train = open_data(DataConfig(path=str(folder / "in"), cache=str(folder / "cache"))).train
    said = f"{train.fingerprint} {train.tokens} {int(train.tokens_N.sum())}"
    (folder / f"said{number}").write_text(said)


def test_processes_that_build_at_once_end_with_one_entry(tmp_path: Path) -> None:
    write_lines(tmp_path, [f"document {number} " * 50 for number in range(3000)])
    fork = multiprocessing.get_context("fork")
    processes = [fork.Process(target=build, args=(tmp_path, number)) for number in range(3)]
    for process in processes:
        process.start()
    assert until(lambda: len(list(tmp_path.glob("ready*"))) == 3)
    (tmp_path / "go").touch()
    for process in processes:
        process.join(600)
    assert [process.exitcode for process in processes] == [0, 0, 0]
    said = [(tmp_path / f"said{number}").read_text() for number in range(3)]
    assert said[0] and said == [said[0]] * 3
    assert len(entries(tmp_path)) == 1


def test_another_s_entry_that_came_first_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_lines(tmp_path, [f"document {number}" for number in range(50)])
    first = open_data(config(tmp_path))
    (entry,) = entries(tmp_path)
    inode = entry.stat().st_ino
    true_open = cache_module._open
    answers = iter([None])  # this process looked before the other was done
    monkeypatch.setattr(cache_module, "_open", lambda *a: next(answers, true_open(*a)))
    second = open_data(config(tmp_path))
    assert same(first, second)
    assert entries(tmp_path) == [entry] and entry.stat().st_ino == inode


def test_what_a_killed_process_left_is_swept_when_old(tmp_path: Path) -> None:
    write_lines(tmp_path, ["one", "two"])
    old, new = tmp_path / "cache" / ".a.0", tmp_path / "cache" / ".b.0"
    for folder in (old, new):
        folder.mkdir(parents=True)
        (folder / "train.tokens").write_text("half")
    os.utime(old, (1, 1))
    open_data(config(tmp_path, validation=0.0))
    assert not old.exists() and new.exists()


def test_an_error_leaves_nothing_in_the_cache(tmp_path: Path) -> None:
    write_lines(tmp_path, ["one", "two"])

    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        open_data(config(tmp_path), progress=stop)
    assert entries(tmp_path) == []


@pytest.mark.parametrize(
    ("content", "said"),
    [("", "is empty: expected"), ("{}\n[]\n", "2 unreadable .*d.jsonl:1: no field 'text'")],
)
def test_data_without_documents_is_refused(tmp_path: Path, content: str, said: str) -> None:
    write_lines(tmp_path, []).write_text(content)
    with pytest.raises(OutsizeError, match=said):
        open_data(config(tmp_path))
    assert entries(tmp_path) == []


def test_all_documents_in_validation_is_refused(tmp_path: Path) -> None:
    texts = [f"document {number}" for number in range(50)]
    write_lines(tmp_path, texts)
    held_out = texts_of(open_data(config(tmp_path)).validation)
    write_lines(tmp_path, held_out[:1])
    with pytest.raises(OutsizeError, match="validation takes all of it, 1 document;"):
        open_data(config(tmp_path))


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    write_lines(tmp_path, ["one", "two"])
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(OutsizeError, match=r"data cache .*cache cannot be written.*data\.cache"):
        open_data(config(tmp_path))


def test_a_full_disk_is_said_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_lines(tmp_path, ["one", "two"])

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OutsizeError, match="No space left on device"):
        open_data(config(tmp_path))
    assert entries(tmp_path) == []


def test_a_large_vocabulary_is_stored_in_32_bits(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocab = {f"w{number}": number for number in range(70_000)}
    inner = Tokenizer(models.WordLevel(vocab, unk_token="w0"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    (tmp_path / "tok").mkdir()
    inner.save(str(tmp_path / "tok" / "tokenizer.json"))
    (tmp_path / "tok" / "config.json").write_text('{"eos_token_id": 69999}')
    write_lines(tmp_path, ["w68000 w5", "w3", "   "])
    own = config(tmp_path, tokenizer=str(tmp_path / "tok"), validation=0.0)
    data = open_data(own, vocab_size=70_000)
    assert data.train.tokens_N.tolist() == [68000, 5, 69999, 3, 69999]
    assert data.train.tokens_N.dtype == np.uint32
    assert data.skipped.empty == 1  # a text that comes to no tokens
    assert isinstance(data.tokenizer, FileTokenizer)
    with pytest.raises(OutsizeError, match="70000 ids, more than the model's vocabulary of 60000"):
        open_data(own, vocab_size=60_000)


def test_many_threads_keep_the_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from outsize.data import texts as reading

    texts = [f"document {number}" for number in range(500)]
    write_lines(tmp_path, texts)
    monkeypatch.setattr(reading, "_BATCH_CHARACTERS", 30)
    true_encode = reading._encode
    delays = iter([0.003, 0.0, 0.001] * 100)

    def slow(*args: object) -> object:
        time.sleep(next(delays))
        return true_encode(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(reading, "_encode", slow)
    done: list[tuple[int, int]] = []
    data = open_data(
        config(tmp_path, validation=0.0), progress=lambda now, total: done.append((now, total))
    )
    assert texts_of(data.train) == texts
    size = (tmp_path / "in" / "d.jsonl").stat().st_size
    assert done == sorted(done) and len(done) >= 3 and done[-1] == (size, size)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"kind": "jsnol"}, "did you mean 'jsonl'"),
        ({"validation": 0.7}, "from 0 to 0.5|0 to 0.5"),
        ({"validation": -0.1}, "-0.1"),
    ],
)
def test_wrong_settings_are_refused(tmp_path: Path, changes: dict, said: str) -> None:
    with pytest.raises(OutsizeError, match=said):
        config(tmp_path, **changes)
