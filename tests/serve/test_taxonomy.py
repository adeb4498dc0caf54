"""docs/serving-taxonomy.md: its switches are there, its headings those of the survey."""

from __future__ import annotations

import re
from pathlib import Path

import click

from outsize.cli.main import main
from outsize.kernels.pages import FORMS
from outsize.models.coding import asked
from outsize.models.families import parse
from outsize.models.presets import PRESETS
from outsize.serve.policies import POLICIES

PAGE = Path(__file__).parents[2] / "docs" / "serving-taxonomy.md"
HEADINGS = {  # of the survey, by words that a line begins with or has
    "Model placement: model parallelism", "Model placement: offloading", "between requests",
    "within a request", "Decoding length prediction", "memory management", "reuse", "compression",
    "disaggregation", "Unlike resources", "Service-aware scheduling", "Load balancing",
    "deployment and cost", "edge devices", "Long context: in parallel", "Long context: attention",
    "Long context: cache", "Retrieval: workflow", "Retrieval: storage", "Experts", "LoRA",
    "Speculative decoding", "Augmented models", "Reasoning at test time", "Hardware", "Privacy",
    "Simulator", "Fairness", "Energy",
}  # fmt: skip


def lines() -> list[list[str]]:
    rows = [line.strip("| ").split(" | ") for line in PAGE.read_text().splitlines() if "|" in line]
    return [row for row in rows if not row[0].startswith(("the survey's", "---"))]


def test_every_heading_has_a_line_with_a_switch_or_says_that_it_is_not_here() -> None:
    found = lines()
    for heading in HEADINGS:
        (own,) = [row for row in found if heading in row[0]]
        assert "`" in own[1] or "**not here**" in own[1] or own[1].startswith("always"), own
    assert len(found) == len(HEADINGS)


def test_its_switches_are_those_of_the_commands() -> None:
    config = parse(PRESETS["mini"])
    spans = [span for row in lines() for span in re.findall(r"`([^`]*)`", " ".join(row))]
    spans = [span for span in spans if "--" in span]
    assert len(spans) > 30
    for span in spans:
        command, _, rest = span.removeprefix("outsize ").partition("--")
        own = main.get_command(click.Context(main), command.split()[0] if command else "serve")
        assert own is not None, span
        words = f"--{rest}".split()
        options = {name for one in own.params for name in one.opts}
        for word, value in zip(words, [*words[1:], ""], strict=True):
            assert not word.startswith("--") or word in options, span
            assert word != "--policy" or value in POLICIES.names(), span
            assert word != "--cache" or value in FORMS, span
            assert word != "--weights" or asked(config, value).coding is not None, span
