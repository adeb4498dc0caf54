"""tools/doc_blocks.py: what it takes for a block, where it runs it, and how it fails."""

from __future__ import annotations

import importlib.util
import os
import select
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def doc_blocks() -> ModuleType:
    spec = importlib.util.spec_from_file_location("doc_blocks", ROOT / "tools" / "doc_blocks.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["doc_blocks"] = module
    spec.loader.exec_module(module)
    return module


def document(*parts: str) -> str:
    return "\n\n".join(parts) + "\n"


def fenced(language: str, body: str, comment: str = "") -> str:
    return (f"<!-- {comment} -->\n" if comment else "") + f"```{language}\n{body}\n```"


def test_blocks_have_line_language_text_and_action(doc_blocks: ModuleType) -> None:
    text = document(
        "# Title",
        fenced("bash", "echo a\necho b"),
        fenced("text", "not run"),
        fenced("bash", "pip install .", "run: root"),
        fenced("python", "print()", "run: skip needs a GPU"),
        fenced("yaml", "steps: 1", "file: run.yaml"),
        "1. item\n\n   ```python\n   if 1:\n       pass\n   ```",
    )
    found = list(doc_blocks.blocks("a.md", text))
    assert [(b.language, b.action) for b in found] == [
        ("bash", "temp"),
        ("text", "read"),
        ("bash", "root"),
        ("python", "read"),
        ("yaml", "file"),
        ("python", "temp"),
    ]
    assert found[0].place == "a.md:3" and found[0].text == "echo a\necho b"
    assert found[5].text == "if 1:\n    pass"


def test_inner_fence_of_longer_fence_is_text(doc_blocks: ModuleType) -> None:
    (block,) = doc_blocks.blocks("a.md", "````text\n```bash\nfalse\n```\n````\n")
    assert block.language == "text" and "```bash" in block.text


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("x\n```bash\necho", 2, "not closed"),
        ("```\necho\n```", 1, "no language is named"),
        ("<!-- run: rot -->\n```bash\n```", 2, "run: rot"),
        ("<!-- run: skip -->\n```bash\n```", 2, "WHY"),
        ("<!-- run: root -->\n```yaml\n```", 2, "cannot be run"),
        ("<!-- file: ../x -->\n```yaml\n```", 2, "plain file name"),
    ],
)
def test_malformed_document_is_refused(
    doc_blocks: ModuleType, text: str, line: int, words: str
) -> None:
    with pytest.raises(doc_blocks.BlockError, match=rf"^a\.md:{line}: .*{words}"):
        list(doc_blocks.blocks("a.md", text))


def test_console_output_is_dropped(doc_blocks: ModuleType) -> None:
    assert doc_blocks.console_commands("$ echo a \\\n> b\na b\n$ true") == "echo a \\\nb\ntrue"


def run(doc_blocks: ModuleType, root: Path, *parts: str, limit: str = "60") -> int:
    (root / "a.md").write_text(document(*parts))
    status: int = doc_blocks.main(["a.md", "--limit", limit])
    return status


def test_blocks_share_files_and_root_blocks_run_at_the_root(
    doc_blocks: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    status = run(
        doc_blocks,
        tmp_path,
        fenced("bash", "echo kept > note; pwd > where"),
        fenced("yaml", "steps: 3", "file: run.yaml"),
        fenced("python", "assert open('note').read() == 'kept\\n'"),
        fenced("python", "assert open('run.yaml').read() == 'steps: 3\\n'"),
        fenced("bash", "pwd > at_root", "run: root"),
        fenced("console", "$ test -e note\nnonsense that is output"),
    )
    assert status == 0
    assert (tmp_path / "at_root").read_text().strip() == str(tmp_path)
    assert not (tmp_path / "note").exists()


@pytest.mark.parametrize(
    ("language", "body", "limit", "words"),
    [
        ("bash", "false\ntrue", "60", "exit code 1"),
        ("bash", "false | cat", "60", "exit code 1"),
        ("python", "raise SystemExit(3)", "60", "exit code 3"),
        ("bash", "sleep 30", "1", "longer than 1 s"),
    ],
)
def test_failure_is_named_by_line_and_stops_the_run(
    doc_blocks: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    language: str,
    body: str,
    limit: str,
    words: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    after = fenced("bash", "touch later", "run: root")
    assert run(doc_blocks, tmp_path, "text", fenced(language, body), after, limit=limit) == 1
    error = capfd.readouterr().err
    assert f"a.md:3: the {language} block" in error and words in error
    assert not (tmp_path / "later").exists()


def test_blocks_are_chosen_by_their_text(
    doc_blocks: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    parts = [fenced("bash", f"touch {name}", "run: root") for name in ("first", "second", "third")]
    (tmp_path / "a.md").write_text(document(*parts))
    made = {"--only": ["second"], "--but": ["first", "third"]}
    for option, names in made.items():
        assert doc_blocks.main(["a.md", option, "second"]) == 0
        assert sorted(path.name for path in tmp_path.iterdir()) == ["a.md", *names]
        for name in names:
            (tmp_path / name).unlink()
        assert doc_blocks.main(["a.md", option, "fourth"]) == 1
        assert "no block that runs has 'fourth'" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["a.md"]


def test_what_a_block_started_ends_where_the_run_is_ended(tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text(
        fenced("bash", "sleep 600 & echo $! >at_root; wait", "run: root")
    )
    script = ROOT / "tools" / "doc_blocks.py"
    run = subprocess.Popen(
        [sys.executable, script, "a.md"], cwd=tmp_path, stdout=subprocess.DEVNULL
    )
    while not (tmp_path / "at_root").exists() or not (tmp_path / "at_root").read_text():
        assert run.poll() is None
        time.sleep(0.01)
    sleeper = os.pidfd_open(int((tmp_path / "at_root").read_text()))
    run.terminate()
    assert run.wait() == 143
    assert select.select([sleeper], [], [], 60.0)[0]
    os.close(sleeper)


def test_readme_opens_with_the_two_commands(doc_blocks: ModuleType) -> None:
    found = doc_blocks.blocks("README.md", (ROOT / "README.md").read_text())
    at_root = [block.text for block in found if block.action == "root"]
    assert at_root[:2] == ["pip install . && outsize train", "pip install '.[test]' && pytest"]
