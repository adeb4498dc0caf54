"""`outsize probe`: what this machine, or all machines of a cluster, were measured to do."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from outsize.cli.command import Command
from outsize.errors import OutsizeError

if TYPE_CHECKING:
    from rich.table import Table

    from outsize.hardware import Hardware
    from outsize.launch import Mailbox


@click.command(cls=Command)
@click.option(
    "--out",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Write it there, for `outsize plan --hardware FILE`.",
)
@click.option("--pairs", is_flag=True, help="Measure rates from each machine to each, too.")
@click.option("--workers", type=click.IntRange(1), help="Workers of this machine that talk.")
@click.option("--device", metavar="NAME", help="cpu, or the accelerator; the best by itself.")
@click.option("--disk", metavar="DIR", default=".", help="Measure the disk of DIR instead of this.")
@click.pass_context
def probe(
    ctx: click.Context,
    out: Path | None,
    pairs: bool,
    workers: int | None,
    device: str | None,
    disk: str,
) -> None:
    """Measure products, attention, memory, copies, the disk and the cost of a call; with
    --workers, or under torchrun, how workers talk as well.

    A cluster: torchrun ... -m outsize probe --out cluster.yaml --pairs, once on every machine.
    """
    from outsize.launch.hosts import run_there, started
    from outsize.launch.local import run_here

    if out is not None and not out.absolute().parent.is_dir():
        raise OutsizeError(f"--out {out}: its folder is not there; make it, or name another")
    asked = _Asked(out, pairs, device, disk)
    if started(os.environ):
        run_there(asked.together, dict(os.environ))
    if (workers or 1) > 1:
        ctx.exit(run_here(workers or 1, asked.together))
    if pairs:
        raise OutsizeError(
            "--pairs measures rates between workers, and there is one; expected --workers 2 or"
            " more, or torchrun on several machines"
        )
    asked.said(asked.alone())


class _Asked:
    """What is to be measured, and where it goes."""

    def __init__(self, out: Path | None, pairs: bool, device: str | None, disk: str) -> None:
        self.out, self.pairs, self.device, self.disk = out, pairs, device, disk

    def alone(self) -> Hardware:
        """This machine."""
        from datetime import date

        from outsize.hardware.disk import disk_rates
        from outsize.hardware.probe import probe as measured

        made = measured(self.device, directory=self.disk, fresh=True)
        read, write = disk_rates(self.disk, date.today().isoformat())
        tiers = (
            replace(tier, read=read, write=write) if tier.name == "disk" else tier
            for tier in made.tiers
        )
        return replace(made, tiers=tuple(tiers))

    def together(self, post: Mailbox) -> int:
        """As one of several workers: the first measures its machine while the others wait."""
        from datetime import date

        import torch

        from outsize import accelerator
        from outsize.collectives.mesh import Mesh
        from outsize.hardware import dumps, loads
        from outsize.hardware.host import processor
        from outsize.launch import enter
        from outsize.launch.probing import Crew, joined

        kind = accelerator.take(self.device, post.here, post.near)
        facts = {"torch": torch.__version__, "processor": processor()}
        group = enter(post, Mesh(data=post.count), facts, kind)
        text = group.told("machine", lambda: dumps(self.alone()))
        machine = loads(text, "rank 0")
        crew = Crew(group.world, post.near, accelerator.find(kind), date.today().isoformat())
        made = joined(machine, crew, self.pairs)
        if group.first:
            self.said(made)
        return 0

    def said(self, made: Hardware) -> None:
        """Print it, and write it where that is asked."""
        from outsize.hardware import dumps
        from outsize.screen import console, say, show
        from outsize.texts import write_text

        screen = console()
        show(screen, _machine(made), *_tables(made))
        if made.slowed is not None:
            say(
                screen,
                f"computing takes {made.slowed.computing:.2f} times as long beside talking, talking"
                f" {made.slowed.talking:.2f} times beside computing",
            )
        if self.out is not None:
            write_text(dumps(made), self.out)
            say(screen, f"written: outsize plan MODEL --hardware {self.out}")


def _machine(made: Hardware) -> Table:
    """Products and attention by shape, bandwidths, copies, the disk, a call."""
    from outsize.memory import format_bytes
    from outsize.screen import table

    device = made.devices[0]
    rows = table(device.name, "", "", right=slice(1, 2))
    for product in device.measured.matmul:
        shape = f"{product.tokens} x {product.d_in} x {product.d_out}"
        rows.add_row(f"product, {product.dtype}", _flops(product.rate.value), shape)
    for one in device.measured.attention:
        shape = f"{one.tokens} tokens, {one.heads} heads of {one.head_size}"
        rows.add_row(f"attention {one.direction}, {one.dtype}", _flops(one.rate.value), shape)
    rows.add_row("memory", _speed(device.bandwidth.value), format_bytes(device.memory_bytes))
    for tier in made.tiers:
        if tier.read is not None and tier.write is not None and tier.name != "device":
            free = f"written {_speed(tier.write.value)}, {format_bytes(tier.bytes)} free"
            rows.add_row(f"{tier.name}, read", _speed(tier.read.value), free)
    for name, rate in (
        ("a call", device.measured.overhead),
        ("an operator of a step", device.measured.handed),
    ):
        if rate is not None:
            rows.add_row(name, f"{rate.value * 1e6:.2f} us", "")
    for link in made.links:
        wait = f"{link.latency.value * 1e6:.1f} us a hop" if link.latency else ""
        rows.add_row(f"{link.name}, {link.between}", _speed(link.bandwidth.value), wait)
    return rows


def _tables(made: Hardware) -> Iterator[Table]:
    """Collectives, and rates between each two."""
    from outsize.memory import format_bytes
    from outsize.screen import FIGURES, table

    if made.talked:
        rows = table("talking", "bytes", "workers", "of a machine", "takes", right=FIGURES)
        for one in made.talked:
            took = f"{one.seconds.value * 1e3:.3g} ms"
            rows.add_row(
                one.operation, format_bytes(one.bytes), str(one.workers), str(one.inside), took
            )
        yield rows
    if made.rates:
        what = "machine" if made.machines > 1 else "worker"
        heads = (f"to {what} {place}" for place in range(len(made.rates)))
        rows = table("from", *heads, right=FIGURES)
        for place, each in enumerate(made.rates):
            rows.add_row(f"{what} {place}", *(_speed(rate) if rate else "-" for rate in each))
        yield rows


def _flops(rate: float) -> str:
    return f"{rate / 1e9:,.1f} GFLOP/s"


def _speed(rate: float) -> str:
    return f"{rate / 1e9:,.2f} GB/s"
