"""`outsize serve`: a model behind the OpenAI API."""

from __future__ import annotations

from pathlib import Path

import click

from outsize.cli.command import Command, adapted, adapters_of, optioned

LOCAL = ("127.0.0.1", "::1", "localhost")


@click.command(cls=Command)
@click.argument("directory", type=click.Path(path_type=Path))
@click.option("--host", default="127.0.0.1", show_default=True, help="Other than this machine's own"
              " wants a --key-file.")  # fmt: skip
@click.option("--port", default=8000, show_default=True, help="0: any that is free.")
@click.option("--key-file", type=click.Path(path_type=Path), metavar="FILE", help="Keys, a line"
              " each, of which requests must have one.")  # fmt: skip
@click.option("--memory", metavar="SIZE", help="Most bytes of tensors, as 2GiB: weights, cache and"
              " steps. Weights beyond it stay in their files, read in each step. Left out: all of"
              " them, and up to half of the memory that is left for the cache.")  # fmt: skip
@click.option("--disk", metavar="DIR", help="With --memory: where weights that must be converted"
              " go; by default the folder for temporary files.")  # fmt: skip
@click.option("--context", type=click.IntRange(1), metavar="TOKENS", help="Of a request, with what"
              " is drawn; by default what the model has, 8,192 at most.")  # fmt: skip
@click.option("--requests", default=16, show_default=True, type=click.IntRange(1, 1024),
              help="That go at once.")  # fmt: skip
@click.option("--step", default=512, show_default=True, type=click.IntRange(1), metavar="TOKENS",
              help="Of a step, at most.")  # fmt: skip
@click.option("--queue", type=click.IntRange(0), metavar="TOKENS", help="Of requests that wait;"
              " more are refused. By default four times the cache's.")  # fmt: skip
@click.option("--policy", default="mixed", show_default=True, help="mixed: tokens of all, slices of"
              " prompts beside them; prompt-first: prompts before anything else.")  # fmt: skip
@click.option("--draft", metavar="NAME", help="lookup: a step looks at several tokens where a text"
              " repeats itself; what comes is the same.")  # fmt: skip
@click.option("--weights", metavar="FORMAT", help="Hold the blocks' matrices in this format.")
@click.option(
    "--template", default="own", help="Of chats: own, a file of Jinja, chatml, llama3, ..."
)
@click.option("--tokenizer", help="A directory with a tokenizer.json, or bytes.")
@adapted
@optioned
@click.option("--device", default="auto", show_default=True, help="cpu, or an accelerator.")
def serve(
    directory: Path,
    host: str,
    port: int,
    key_file: Path | None,
    memory: str | None,
    disk: str | None,
    context: int | None,
    requests: int,
    step: int,
    queue: int | None,
    policy: str,
    draft: str | None,
    weights: str | None,
    template: str,
    tokenizer: str | None,
    adapters: tuple[str, ...],
    device: str,
) -> None:
    """Serve the model in DIRECTORY (a run, a checkpoint, an adapter's directory, any Hugging Face
    decoder) by the OpenAI API: /v1/completions, /v1/chat/completions, /v1/models, and /tokenize,
    /health, /metrics. SIGTERM and Ctrl-C end it once what was begun is answered.
    """
    from outsize import accelerator
    from outsize.cli.generate import found_in, limits_of, opened
    from outsize.errors import OutsizeError
    from outsize.models.coding import asked
    from outsize.serve.drafts import DRAFTERS
    from outsize.serve.engine import Engine
    from outsize.serve.policies import POLICIES
    from outsize.serve.room import Wanted, served

    try:
        from outsize.serve.http.guard import keys_in
        from outsize.serve.http.run import run, socket_of
    except ImportError as error:
        raise OutsizeError(
            f"serve: {error.name} is missing; pip install 'outsize[serve]'"
        ) from None
    chosen = POLICIES.get(policy)
    drafter = None if draft is None else DRAFTERS.get(draft)
    if key_file is None and host not in LOCAL:
        raise OutsizeError(f"--host {host} is open to other machines; give a --key-file with it")
    keys = () if key_file is None else keys_in(key_file)
    limits = None if memory is None else limits_of(memory, disk, False)
    if memory is None and disk is not None:
        raise OutsizeError("--disk goes with --memory; give --memory SIZE")
    place = accelerator.named(device)
    found, config, text = found_in(directory, tokenizer)
    config = asked(config, weights, "--weights")
    listening = socket_of(host, port)  # a port in use is known before weights are read
    with listening, opened(found, config, limits, place, adapters_of(adapters)) as model:
        wanted = Wanted(context, requests, step, queue, draft is not None)
        plan = served(model, wanted)
        for line in plan.lines():
            click.echo(line)
        engine = Engine(model, plan.room, chosen, plan.session, drafter)
        run(engine, text, found, directory, template, tokenizer, keys, listening, plan.lines())
