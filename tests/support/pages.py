"""HTML pages taken apart, and drawn by a browser."""

from __future__ import annotations

import json
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

BROWSERS = ("chromium", "chromium-browser", "google-chrome")


class Reader(HTMLParser):
    """Elements by name, and the text inside each script."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.text = ""
        self.inside = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self.inside = tag == "script"
        if self.inside:
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        self.inside = False

    def handle_data(self, data: str) -> None:
        if self.inside:
            self.scripts[-1] += data
        else:
            self.text += data


def parse(page: str) -> tuple[Reader, dict[str, Any]]:
    reader = Reader()
    reader.feed(page)
    assert len(reader.scripts) == 2
    return reader, json.loads(reader.scripts[0])


def drawn(page: Path, link: str = "") -> str:
    """The page as a browser makes it, its script run; link: what follows its address."""
    browser = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if browser is None:
        pytest.skip("no Chromium on this machine")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"]
    flags += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
    flags += [f"--user-data-dir={page.parent}/profile", "--virtual-time-budget=1500", "--dump-dom"]
    flags += ["--enable-logging=stderr"]
    run = subprocess.run(
        [browser, *flags, page.as_uri() + link],
        capture_output=True,
        text=True,
        timeout=600,
        check=True,
    )
    assert "Uncaught" not in run.stderr
    assert 'data-drawn="yes"' in run.stdout, "the script ran to the end of its first drawing"
    return run.stdout
