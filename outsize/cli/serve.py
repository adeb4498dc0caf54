"""`outsize serve`: a model behind the OpenAI API."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from outsize.cli.command import Light, adapted, adapters_of, optioned

if TYPE_CHECKING:
    from socket import socket

    from outsize.collectives import Mesh
    from outsize.data.tokenizer import Tokenizer
    from outsize.launch import Speaker
    from outsize.launch.heartbeat import Heartbeat
    from outsize.memory.tiers import TierSpec
    from outsize.serve.files import Limits
    from outsize.serve.http.keys import Key
    from outsize.serve.model import Model
    from outsize.serve.room import Wanted

LOCAL = ("127.0.0.1", "::1", "localhost")
FAREWELL = 5.0  # seconds in which who waits is told that a worker has failed


@click.command(cls=Light)
@click.argument("directory", type=click.Path(path_type=Path))
@click.option("--host", default="127.0.0.1", show_default=True, help="Other than this machine's own"
              " wants a --key-file.")  # fmt: skip
@click.option("--port", default=8000, show_default=True, help="0: any that is free.")
@click.option("--key-file", type=click.Path(path_type=Path), metavar="FILE", help="Keys, a line"
              " each, of which requests must have one; behind a key requests=60 tokens=20000, what"
              " it may have in a minute.")  # fmt: skip
@click.option("--memory", metavar="SIZE", help="Most bytes of tensors, as 2GiB: weights, cache and"
              " steps. Weights beyond it stay in their files, read in each step. Left out: all of"
              " them, and up to half of the memory that is left for the cache.")  # fmt: skip
@click.option("--disk", metavar="DIR[:SIZE]", help="Where pages of the cache go that are pushed out"
              " and wanted again; with --memory also weights that must be converted.")  # fmt: skip
@click.option("--host-memory", metavar="SIZE", help="The same, where the cache is an accelerator's;"
              " filled before --disk.")  # fmt: skip
@click.option("--context", type=click.IntRange(1), metavar="TOKENS", help="Of a request, with what"
              " is drawn; by default what the model has, 8,192 at most.")  # fmt: skip
@click.option("--requests", default=16, show_default=True, type=click.IntRange(1, 1024),
              help="That go at once.")  # fmt: skip
@click.option("--step", default=512, show_default=True, type=click.IntRange(1), metavar="TOKENS",
              help="Of a step, at most.")  # fmt: skip
@click.option("--queue", type=click.IntRange(0), metavar="TOKENS", help="Of requests that wait;"
              " more are refused. By default four times the cache's.")  # fmt: skip
@click.option("--policy", default="mixed", show_default=True, help="What a step feeds: mixed"
              " (tokens of all, slices of prompts beside them), fixed, decode-maximal, first-come,"
              " prompt-first, feedback, deadline, fair.")  # fmt: skip
@click.option("--slo", metavar="SLO", help="What is promised, as ttft=500ms,tpot=50ms: steps are no"
              " longer than tpot, and who would wait longer than ttft is refused.")  # fmt: skip
@click.option("--draft", metavar="NAME", help="lookup: a step looks at several tokens where a text"
              " repeats itself; what comes is the same.")  # fmt: skip
@click.option("--weights", metavar="FORMAT", help="as-stored, bf16, or the blocks' matrices in a"
              " format of outsize keys weights, +head behind it: the head in 8 bits; +a8: what they"
              " multiply in 8 bits too, +outliers: but for its outliers.")  # fmt: skip
@click.option("--cache", default="as-stored", show_default=True, metavar="FORM", help="Hold keys"
              " and values as bf16, or as intN in N = 8 or 4 bits, rounded; contiguous, or behind"
              " one of these +contiguous: one behind another, not in pages.")  # fmt: skip
@click.option(
    "--template", default="own", help="Of chats: own, a file of Jinja, chatml, llama3, ..."
)
@click.option("--tokenizer", help="A directory with a tokenizer.json, or bytes.")
@adapted
@optioned
@click.option("--device", default="auto", show_default=True, help="cpu, or an accelerator.")
@click.option("--workers", type=int, help="Processes on this machine, each with a run of layers.")
@click.option("--mesh", metavar="AXES", help="Workers on each axis, as pipeline=2,tensor=2.")
@click.pass_context
def serve(
    ctx: click.Context,
    directory: Path,
    host: str,
    port: int,
    key_file: Path | None,
    memory: str | None,
    disk: str | None,
    host_memory: str | None,
    context: int | None,
    requests: int,
    step: int,
    queue: int | None,
    policy: str,
    slo: str | None,
    draft: str | None,
    weights: str | None,
    cache: str,
    template: str,
    tokenizer: str | None,
    adapters: tuple[str, ...],
    device: str,
    workers: int | None,
    mesh: str | None,
) -> None:
    """Serve the model in DIRECTORY (a run, a checkpoint, an adapter's directory, any Hugging Face
    decoder, a .gguf file) by the OpenAI API: completions, chats, embeddings, models; /tokenize,
    /health, /metrics. SIGTERM and Ctrl-C end it once what was begun is answered.
    """
    spread = mesh is not None or workers is not None or "RANK" in os.environ
    if spread:
        # Before PyTorch is loaded: threads that spin while others take their turn keep them from it
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from outsize import accelerator
    from outsize.cli.generate import found_in, opened
    from outsize.errors import OutsizeError
    from outsize.models.coding import held
    from outsize.serve.drafts import DRAFTERS
    from outsize.serve.policies import chosen
    from outsize.serve.room import Wanted
    from outsize.serve.slo import NONE, parse_slo

    keys = _keys(host, key_file)
    promised = NONE if slo is None else parse_slo(slo)
    chosen(policy, promised)
    if draft is not None:
        DRAFTERS.get(draft)
    below, limits = _tiers(memory, host_memory, disk)
    wanted = Wanted(context, requests, step, queue, draft is not None, promised, cache, below)
    served = _Served(directory, wanted, policy, draft, template, tokenizer, keys, host, port)
    if spread:
        if weights:
            raise OutsizeError("--weights is for one worker; convert the model before")
        served.on_workers(ctx, mesh, workers, limits, device, adapters_of(adapters))
    place = accelerator.named(device)
    found, config, text = found_in(directory, tokenizer)
    config, dtype = held(config, weights, "--weights")
    listening = _listening(host, port)  # a port in use is known before weights are read
    with listening, opened(found, config, limits, place, adapters_of(adapters), dtype) as model:
        served.go(model, text, found, listening)


def _listening(host: str, port: int) -> socket:
    """The socket; a server's own imports begin."""
    from outsize.serve.http.listening import import_meanwhile, socket_of

    found = socket_of(host, port)
    import_meanwhile()
    return found


def _tiers(
    memory: str | None, host_memory: str | None, disk: str | None
) -> tuple[tuple[TierSpec, ...], Limits | None]:
    """Where pages go that are pushed out, and the limits of what is on the device."""
    from outsize.cli.generate import limits_of
    from outsize.memory.tiers import disk_tier, host_tier

    found = [] if host_memory is None else [host_tier(host_memory)]
    found += [] if disk is None else [disk_tier(disk)]
    folder = None if disk is None else str(found[-1].paths[0])
    return tuple(found), None if memory is None else limits_of(memory, folder, False)


def _keys(host: str, key_file: Path | None) -> tuple[Key, ...]:
    """Of which requests must have one. OutsizeError where what serves them is not installed."""
    from outsize.errors import OutsizeError
    from outsize.serve.http.listening import check_installed

    check_installed()
    if key_file is None and host not in LOCAL:
        raise OutsizeError(f"--host {host} is open to other machines; give a --key-file with it")
    if key_file is None:
        return ()
    from outsize.serve.http.keys import keys_in

    return keys_in(key_file)


@dataclass(frozen=True)
class _Served:
    """What is served, whatever the model lies on. policy, draft: by name; keys: of which requests
    must have one."""

    directory: Path
    wanted: Wanted
    policy: str
    draft: str | None
    template: str
    tokenizer: str | None
    keys: tuple[Key, ...]
    host: str
    port: int

    def go(
        self,
        model: Model,
        text: Tokenizer | None,
        found: Path,
        listening: socket | None,
        pulse: Heartbeat | None = None,
    ) -> None:
        """Serve until a signal ends it; as one of several workers, until the one ends it that is
        asked. text, listening None: to be opened by that one."""
        from outsize.cli.generate import tokenizer_in
        from outsize.models.packing import pack
        from outsize.serve.drafts import DRAFTERS
        from outsize.serve.engine import Engine
        from outsize.serve.http.listening import socket_of
        from outsize.serve.http.run import run
        from outsize.serve.policies import chosen, unkept_by
        from outsize.serve.room import served

        pack(model)
        plan = served(model, self.wanted, partial(click.echo, err=True))
        drafter = None if self.draft is None else DRAFTERS.get(self.draft)
        playing = chosen(self.policy, plan.room.slo)
        engine = Engine(model, plan.room, playing, plan.session, drafter, pulse, plan.below)
        if not engine.steps.leads:
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.SIG_IGN)  # the one that is asked heeds them
            engine.steps.follow()
            return
        if pulse is not None:
            pulse.at("serving")
        lines = [*plan.lines(), *unkept_by(self.policy, plan.room.slo)]
        text = text or tokenizer_in(found, self.tokenizer, model.config)
        for line in lines:
            click.echo(line)
        with listening or socket_of(self.host, self.port) as here:
            run(
                engine, text, found, self.directory, self.template, self.tokenizer, self.keys,
                here, lines,
            )  # fmt: skip

    def on_workers(
        self,
        ctx: click.Context,
        mesh: str | None,
        workers: int | None,
        limits: Limits | None,
        device: str,
        adapters: Sequence[tuple[str, float]],
    ) -> None:
        """Serve on several workers and leave; nothing where there is one."""
        from outsize.cli.generate import found_in, on_each
        from outsize.launch.hosts import started
        from outsize.plan.settings import NONE
        from outsize.serve.http.listening import socket_of
        from outsize.serve.workers import Asked, run_workers, several

        names = ("wanted", "policy", "draft", "tokenizer")
        facts = {name: repr(getattr(self, name)) for name in names}
        settings = NONE.having({"overlap": 0})  # prompts come in slices beside single tokens
        taken = on_each(adapters, limits)
        asked = Asked(mesh, workers, facts, limits, settings, device, taken)
        if not several(asked):
            return
        here = None if started(os.environ) else socket_of(self.host, self.port)

        def meet(model: Model, first: bool, pulse: Heartbeat) -> None:
            assert model.origin is not None
            self.go(model, None, model.origin, here, pulse)

        def find() -> Path:
            return found_in(self.directory, self.tokenizer)[0]

        ctx.exit(run_workers(asked, find, meet, _speaker))


def _speaker(mesh: Mesh) -> Speaker:
    """The worker that is asked."""
    from outsize.launch import Speaker
    from outsize.serve.steps import front

    return Speaker(front(mesh), FAREWELL)
