"""The page of `outsize data show`: samples with their targets marked, one file without a script."""

from __future__ import annotations

import html
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from string import Template

from outsize.data.shown import Overview, Piece, Sample
from outsize.texts import write_text

_BARS = 32  # of the chart of lengths


def samples(overview: Overview, title: str) -> str:
    """The page as HTML."""
    page = (files("outsize.report") / "page" / "samples.html").read_text(encoding="utf-8")
    notes = "".join(f"<p>{html.escape(line)}</p>" for line in overview.lines())
    return Template(page).substitute(
        title=html.escape(title), tiles="".join(_tiles(overview)), notes=notes,
        lengths=_lengths(overview), samples="".join(map(_card, overview.shown)),
    )  # fmt: skip


def write_samples(path: str | Path, overview: Overview, title: str) -> Path:
    """Write the page. OutsizeError where it cannot be written."""
    return write_text(samples(overview, title), path)


def _tiles(overview: Overview) -> Iterator[str]:
    longer = sum(1 for one in overview.cut if one)
    figures = [
        ("samples", f"{len(overview.lengths):,}", f"{sum(overview.lengths):,} tokens"),
        ("targets", f"{overview.share:.1%}", f"{sum(overview.targets):,} tokens"),
        ("longest", f"{max(overview.lengths):,}", f"a row has {overview.sequence:,} tokens"),
        ("cut", f"{longer:,}", f"{sum(overview.cut):,} tokens cut off"),
    ]
    for name, figure, note in figures[: 4 if overview.whole else 3]:
        yield (
            f'<div class="tile"><span class="name">{name}</span>'
            f'<span class="figure">{figure}</span><span class="note">{note}</span></div>'
        )


def _lengths(overview: Overview) -> str:
    """How many samples there are of each length, and where a row ends."""
    most = max(*overview.lengths, overview.sequence)
    counts = [0] * _BARS
    for length in overview.lengths:
        counts[min(_BARS - 1, length * _BARS // (most + 1))] += 1
    top, width = max(counts), 600 / _BARS
    bars = []
    for place, count in enumerate(counts):
        high = 100 * count / top
        first, end = (at * (most + 1) // _BARS for at in (place, place + 1))
        bars.append(
            f'<rect x="{place * width + 1:.1f}" y="{104 - high:.1f}" width="{width - 2:.1f}"'
            f' height="{high:.1f}"><title>{first:,} to {end - 1:,} tokens: {count:,}</title></rect>'
        )
    row = 600 * overview.sequence / (most + 1)
    return (
        '<svg viewBox="0 0 600 124" role="img" aria-label="Samples by length">'
        f'{"".join(bars)}<line x1="{row:.1f}" x2="{row:.1f}" y1="0" y2="104"/>'
        f'<text x="0" y="120">0</text><text x="600" y="120" text-anchor="end">{most:,} tokens'
        "</text></svg>"
    )


def _card(sample: Sample) -> str:
    cut = f", <b>{sample.cut:,} cut off</b>" if sample.cut else ""
    head = f"{html.escape(sample.where) or 'sample'}"
    said = f"{sample.tokens:,} tokens, {sample.targets:,} targets{cut}"
    text = "".join(map(_marked, sample.pieces))
    return (
        f'<section class="card"><div class="head"><h2>{head}</h2><span>{said}</span></div>'
        f"<pre>{text}</pre></section>"
    )


def _marked(piece: Piece) -> str:
    text = html.escape(piece.text)
    if piece.kind == "cut":
        return f"<s>{text}</s>"
    if piece.kind == "context":
        return text
    weight = "" if piece.weight == 1 else f' title="weight {piece.weight:g}"'
    tag = "" if piece.weight == 1 else f"<sup>×{piece.weight:g}</sup>"
    return f"<mark{weight}>{text}</mark>{tag}"
