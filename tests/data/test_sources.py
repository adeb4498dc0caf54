"""Files found and read: kinds, order, and what is skipped, where and why."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from outsize.data import records, sources, unpacked
from outsize.data.files import find_files
from outsize.data.source import detected
from outsize.data.sources import ReadLog, read_documents
from outsize.errors import OutsizeError


def read(*paths: Path | str, kind: str | None = None, field: str = "text") -> tuple:
    found = find_files(tuple(map(str, paths)), kind)  # type: ignore[arg-type]
    log = ReadLog(ignored=found.ignored)
    texts = [text for file in found.files for text in read_documents(file, field, log)]
    assert log.done == sum(file.size for file in found.files)
    return texts, log


def places(report: ReadLog) -> list[str]:
    return [f"{Path(skip.where).name}: {skip.why}" for skip in report.skips]


def test_a_directory_is_read_in_sorted_order_by_suffix(tmp_path: Path) -> None:
    for name in ("b.txt", "a/z.md", "a/y.txt", "c.jpg", ".git/x.txt", "a.txt", "d.JSONL"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(name if path.suffix != ".JSONL" else json.dumps({"text": "line"}))
    texts, report = read(tmp_path)
    assert texts == ["a/y.txt", "a/z.md", "a.txt", "b.txt", "line"]
    assert report.ignored == 1 and report.bad == 0
    assert read(tmp_path, kind="text")[0] == ["a/y.txt", "a/z.md", "a.txt", "b.txt"]


def test_a_file_named_twice_is_read_once(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one")
    assert read(tmp_path / "a.txt", tmp_path, f"{tmp_path}/./a.txt")[0] == ["one"]


def test_a_named_file_of_unknown_suffix_is_text(tmp_path: Path) -> None:
    (tmp_path / "README").write_bytes("\ufeffé\r\n".encode())
    assert read(tmp_path / "README")[0] == ["é\r\n"]  # the mark goes, nothing else changes


def test_corrupt_json_lines_are_skipped_with_their_line(tmp_path: Path) -> None:
    lines = [
        b'{"text": "good"}',
        b'{"text": "cut',
        b"",
        b"[1, 2]",
        b'{"body": "other"}',
        b'{"text": 5}',
        b'{"text": "\xff"}',
        b'{"text": "\\ud800"}',
        b"[" * 100_000,
        b'{"text": ""}',
        b'{"text": "\\u00e9nd", "more": 1}',
    ]
    (tmp_path / "d.jsonl").write_bytes(b"\n".join(lines))
    texts, report = read(tmp_path / "d.jsonl")
    assert texts == ["good", "énd"]
    assert report.bad == 7 and report.empty == 1
    said = places(report)
    assert [one.split(":")[1] for one in said] == ["2", "4", "5", "6", "7", "8", "9"]
    reasons = ["JSON", "list", "'body'", "int", "UTF-8", "surrogate", "JSON"]
    assert all(reason in one for reason, one in zip(reasons, said, strict=True))
    assert "7 unreadable (first: " in report.summary() and "d.jsonl:2: not JSON" in report.summary()


def test_the_field_can_be_named_and_the_kind_forced(tmp_path: Path) -> None:
    (tmp_path / "d.json").write_text('{"body": "one"}\n{"body": "two"}\n')
    assert read(tmp_path / "d.json", kind="jsonl", field="body")[0] == ["one", "two"]
    assert read(tmp_path, kind="jsonl", field="body")[0] == ["one", "two"]


def test_remembered_skips_are_bounded_and_the_count_is_not(tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").write_text("x\n" * 1000)
    _, report = read(tmp_path / "d.jsonl")
    assert report.bad == 1000 and len(report.skips) == sources.SKIPS_KEPT


def test_text_that_is_not_utf8_is_skipped_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"fine\nfine\nr\xe9sum\xe9\n")
    (tmp_path / "b.txt").write_text("fine")
    texts, report = read(tmp_path)
    assert texts == ["fine"]
    assert places(report) == ["a.txt:3: not UTF-8 (byte 0xe9)"]


def test_a_binary_file_is_refused_when_named_and_skipped_in_a_directory(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"MZ\0\0binary")
    (tmp_path / "b.txt").write_text("text")
    with pytest.raises(OutsizeError, match=r"a\.txt is binary .*UTF-8 text"):
        read(tmp_path / "a.txt")
    texts, report = read(tmp_path)
    assert texts == ["text"] and report.bad == 1 and "binary" in places(report)[0]


@pytest.mark.parametrize("where", ["nowhere", "nowhere/at/all.txt"])
def test_a_missing_path_is_named(tmp_path: Path, where: str) -> None:
    with pytest.raises(OutsizeError, match=f"{where} does not exist"):
        read(tmp_path / where)


def test_a_path_that_holds_nothing_to_read_says_what_it_holds(tmp_path: Path) -> None:
    with pytest.raises(OutsizeError, match="found no files"):
        read(tmp_path)
    (tmp_path / "a.jpg").touch()
    with pytest.raises(OutsizeError, match=r"found 1 \.jpg"):
        read(tmp_path)
    for empty in ((), ("",)):
        with pytest.raises(OutsizeError, match=r"data\.path is empty"):
            find_files(empty)
    with pytest.raises(OutsizeError, match="a file or a directory"):
        read("/dev/null")


@pytest.mark.parametrize("text", ["é" * 50, "ab\n" * 30, "€\n" * 7 + "x" * 40, "\n", "ab" * 6])
def test_a_large_file_is_cut_into_documents_that_make_it_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setattr(sources, "PIECE_BYTES", 12)
    (tmp_path / "a.txt").write_text(text)
    texts, report = read(tmp_path / "a.txt")
    assert "".join(texts) == text and report.bad == 0 and "" not in texts
    assert max(len(piece.encode()) for piece in texts) <= 24
    if "\n" in text[:12]:
        assert texts[0].endswith("\n")


def test_a_bad_byte_far_into_a_large_file_costs_one_piece(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "PIECE_BYTES", 12)
    lines = [b"line %03d\n" % number for number in range(20)]
    lines[10] = b"line \xff\xff\xff\n"
    (tmp_path / "a.txt").write_bytes(b"".join(lines))
    texts, report = read(tmp_path / "a.txt")
    assert report.bad == 1 and places(report)[0].startswith("a.txt:11: ")
    kept = "".join(texts).splitlines(keepends=True)
    assert set(kept) < {line.decode() for number, line in enumerate(lines) if number != 10}
    assert len(kept) >= 17


def test_parquet(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    arrow = pytest.importorskip("pyarrow")
    path = tmp_path / "d.parquet"
    table = arrow.table({"text": ["one", None, "", "four"], "n": [1, 2, 3, 4]})
    parquet.write_table(table, path)
    texts, report = read(path)
    assert texts == ["one", "four"] and report.empty == 1
    assert places(report) == ["d.parquet:2: 'text' is NoneType, expected a string"]
    with pytest.raises(OutsizeError, match=r"no column 'body' \(columns: text, n\); data\.field"):
        read(path, field="body")
    assert "'n' is int" in places(read(path, field="n")[1])[0]


def test_a_broken_parquet_file_is_refused_when_named_and_skipped_else(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    (tmp_path / "a.parquet").write_bytes(b"PAR1 this is not")
    (tmp_path / "b.txt").write_text("text")
    with pytest.raises(OutsizeError, match=r"a\.parquet not readable as Parquet"):
        read(tmp_path / "a.parquet")
    texts, report = read(tmp_path)
    assert texts == ["text"] and report.bad == 1


def test_parquet_without_pyarrow_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(records.importlib, "import_module", missing)
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    with pytest.raises(OutsizeError, match=r"pip install 'outsize\[data\]'"):
        read(tmp_path / "a.parquet")


def test_a_file_that_goes_away_is_skipped(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one")
    (tmp_path / "b.txt").write_text("two")
    found = find_files((str(tmp_path),))
    (tmp_path / "a.txt").unlink()
    log = ReadLog()
    texts = [text for file in found.files for text in read_documents(file, "text", log)]
    assert texts == ["two"] and log.bad == 1 and "cannot be read" in log.skips[0].why


RECORDS = [{"text": "one", "n": 1}, {"text": 'naïve, "two"\nlines'}, {"text": "€ three [4]"}]


@pytest.mark.parametrize("piece", [3, 2**20])
@pytest.mark.parametrize("indent", [None, 2])
def test_an_array_of_json_is_read_as_its_records(tmp_path, monkeypatch, indent, piece) -> None:
    monkeypatch.setattr(records, "PIECE_BYTES", piece)
    (tmp_path / "a.json").write_text(json.dumps(RECORDS, indent=indent, ensure_ascii=False))
    found = read(tmp_path / "a.json")
    assert found[0] == [one["text"] for one in RECORDS] == read(tmp_path)[0] and not found[1].bad
    (tmp_path / "a.json").write_text("\n".join(json.dumps(one) for one in RECORDS))
    assert read(tmp_path / "a.json")[0] == [one["text"] for one in RECORDS]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[{"text": "a"},\n{"text": "b"', "a.json:2: not JSON"),
        ('[{"text": "a"}\n{"text": "b"}]', "a.json:2: not JSON (no ',' or ']' behind)"),
        ('[{"text": "a"},\n\n7]', "a.json:3: expected a JSON object, found int"),
        ('[{"text": "a"},\n{"body": "b", "id": 1}]',
         "a.json:2: no field 'text' (fields: 'body', 'id'); data.field names the one"),
        (b'[{"text": "a"},\n{"text": "\xff"}]', "a.json:2: not JSON"),
        ('[{"text": "a"},\n', "a.json:2: not JSON (the array does not end)"),
        ('[{"text": "a"}]\n[{"text": "b"}]', "a.json:2: not JSON (something stands behind the"),
    ],
)  # fmt: skip
def test_what_is_wrong_in_an_array_has_its_line(tmp_path, text, said) -> None:
    content = text if isinstance(text, bytes) else text.encode()
    (tmp_path / "a.json").write_bytes(content)
    texts, report = read(tmp_path / "a.json")
    assert texts == ["a"] and report.bad == 1 and places(report)[0].startswith(said)


def test_rows_of_csv(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text('\ufefftext,n\r\n"a ""b"",\nc",1\r\nd,2\r\ne\r\n', newline="")
    (tmp_path / "b.tsv").write_text("n\ttext\n1\tx, y\n")
    texts, report = read(tmp_path)
    assert texts == ['a "b",\nc', "d", "x, y"]
    assert places(report) == ["a.csv:4: not 2 cells, as the first row has"]
    (tmp_path / "b.tsv").write_text("text\tn\t\ttext\t\na\t1\t\tb\t\n")
    assert places(read(tmp_path)[1])[1] == "b.tsv:1: two columns are called 'text'"


@pytest.mark.parametrize("packed", ["gz", "zst"])
def test_compressed_files_are_what_is_in_them(tmp_path: Path, packed: str) -> None:
    def pack(name: str, content: bytes) -> None:
        if packed == "gz":
            import gzip

            made = gzip.compress(content[:7]) + gzip.compress(content[7:])
        else:
            zstandard = pytest.importorskip("zstandard")
            press = zstandard.ZstdCompressor().compress
            made = press(content[:7]) + press(content[7:])
        (tmp_path / f"{name}.{packed}").write_bytes(made)

    pack("a.jsonl", b'{"text": "one"}\n{"text": "two"}\n')
    pack("b.json", b'[{"text": "three"}]')
    pack("c.csv", b"text\nfour\n")
    pack("c.tsv", b"n\ttext\n1\tx, y\n")
    pack("d.txt", "fünf\n".encode())
    pack("e.tar", b"\0" * 99)
    texts, report = read(tmp_path)
    assert texts == ["one", "two", "three", "four", "x, y", "fünf\n"] and report.ignored == 1
    with pytest.raises(OutsizeError, match=rf"e\.tar\.{packed} is binary"):
        read(tmp_path / f"e.tar.{packed}")
    path = tmp_path / f"a.jsonl.{packed}"
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(OutsizeError, match=r"a\.jsonl.* cannot be read: not readable as"):
        read(path)
    texts, report = read(tmp_path)
    assert texts[-4:] == ["three", "four", "x, y", "fünf\n"]
    assert report.bad == 1 and "not readable as" in places(report)[0]


def test_zstandard_without_its_package_says_what_to_install(tmp_path, monkeypatch) -> None:
    def missing(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(unpacked.importlib, "import_module", missing)
    (tmp_path / "a.jsonl.zst").write_bytes(b"x")
    with pytest.raises(OutsizeError, match=r"zstandard: pip install 'outsize\[data\]'"):
        read(tmp_path / "a.jsonl.zst")


def test_a_pattern_stands_for_its_files_in_order(tmp_path: Path) -> None:
    for name in ("b-1.jsonl", "a/b-0.jsonl", "c.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(json.dumps({"text": name}))
    assert read(tmp_path / "b-*.jsonl")[0] == ["b-1.jsonl"]
    assert read(tmp_path / "**/b-?.jsonl")[0] == ["a/b-0.jsonl", "b-1.jsonl"]
    (tmp_path / "[x].jsonl").write_text('{"text": "brackets"}')
    assert read(tmp_path / "[x].jsonl")[0] == ["brackets"]
    with pytest.raises(OutsizeError, match=r"z-\*\.txt matches no file"):
        read(tmp_path / "z-*.txt")


def test_stdlib_is_megabytes_of_real_text() -> None:
    found = find_files(("stdlib",))
    names = {file.path.name for file in found.files}
    assert {"argparse.py", "topics.py", "typing.py"} <= names
    assert sum(file.size for file in found.files) > 8e6
    assert not any("site-packages" in file.path.parts for file in found.files)
    assert found == find_files(("stdlib",))


def test_nothing_skipped_is_said_so() -> None:
    assert ReadLog().summary() == "nothing skipped"
    assert ReadLog(duplicates=2, ignored=1).summary() == (
        "skipped 2 duplicates, 1 files of other kinds"
    )


def test_reports_of_two_readings_add_up() -> None:
    one, other = ReadLog(bad=1, empty=2, cut=3), ReadLog(bad=4, cut=5, lost=6, unended=7)
    one.skip("a:1", "x")
    other.skip("b:1", "y")
    both = one.plus(other)
    assert (both.bad, both.empty, both.cut, both.lost, both.unended) == (7, 2, 8, 6, 7)
    assert places(both) == ["a:1: x", "b:1: y"]


def test_the_first_object_says_what_records_are(tmp_path: Path) -> None:
    """Not a line before it that cannot be read, or is something else."""
    chat = '{"messages": [{"role": "user", "content": "a"}]}\n'
    for name, text in (("a", chat), ("b", '{"messages": [}\n\n"a"\n[1]\nnull\n' + chat)):
        (tmp_path / f"{name}.jsonl").write_text(text)
        found = detected((str(tmp_path / f"{name}.jsonl"),), "text")
        assert found is not None and found[:2] == ("data.chat", "messages")
    (tmp_path / "c.jsonl").write_text('[1]\n{"text": "a"}\n' + chat)
    assert detected((str(tmp_path / "c.jsonl"),), "text") is None
