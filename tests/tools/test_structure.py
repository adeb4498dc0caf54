"""tools/touch.py and tools/sizes.py see what they look for, and the tree passes them."""

from __future__ import annotations

import runpy
from pathlib import Path

TOOLS = Path(__file__).parents[2] / "tools"
TOUCH, SIZES = (runpy.run_path(str(TOOLS / f"{name}.py")) for name in ("touch", "sizes"))


def test_the_tree_passes(capsys):
    assert TOUCH["main"](["--check"]) == 0, capsys.readouterr().err
    assert SIZES["main"](["--check"]) == 0, capsys.readouterr().err


def test_every_technique_is_counted():
    package = TOUCH["PACKAGE"]
    subjects = [*TOUCH["SUBJECTS"].values(), *TOUCH["registered"]().values()]
    own = tuple(path for subject in subjects for path in subject.own)
    files = [f for f in (package / "techniques").rglob("*.py") if f.stem != "__init__"]
    assert len(files) >= 5
    assert [f for f in files if not str(f.relative_to(package)).startswith(own)] == []


def test_a_file_that_names_a_technique_is_found():
    subject = TOUCH["Subject"](r"\bRegistry\b", ("registry",))
    touched = TOUCH["touched"](subject)
    assert "models/seams.py" in touched and "registry.py" not in touched


def test_one_file_names_the_devices_of_a_maker():
    package = TOUCH["PACKAGE"]
    found = [f for f in package.rglob("*.py") if "cuda" in f.read_text().lower()]
    assert [str(f.relative_to(package)) for f in found] == ["accelerator.py"]


def test_what_is_too_large_is_found(tmp_path):
    file = tmp_path / "large.py"
    methods = "".join(f"    def m{i}(self): ...\n" for i in range(21))
    body = "".join(f"    x{i} = {i}\n" for i in range(61))
    names = ", ".join(f"p{i}" for i in range(11))
    file.write_text(f"class C:\n{methods}\ndef long():\n{body}\ndef wide({names}): ...\n")
    assert dict(SIZES["over"](file, "large.py")) == {
        "large.py:C": "21 methods, at most 20",
        "large.py:long": "61 lines, at most 60",
        "large.py:wide": "11 parameters, at most 10",
    }
    file.write_text("x = 1\n" * 401)
    assert dict(SIZES["over"](file, "large.py")) == {"large.py": "401 lines, at most 400"}
