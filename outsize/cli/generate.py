"""`outsize generate`: text from a checkpoint or any Hugging Face decoder directory."""

from __future__ import annotations

from pathlib import Path

import click


@click.command()
@click.argument("directory", type=click.Path(path_type=Path))
@click.option("--prompt", default="", help="What the text begins with.")
@click.option("--max-tokens", default=200, show_default=True, help="Most tokens to add.")
@click.option("--temperature", default=0.0, show_default=True, help="0: the likeliest token.")
@click.option("--top-k", type=int, help="Draw from so many of the likeliest tokens.")
@click.option("--top-p", default=1.0, show_default=True, help="Draw from so much probability.")
@click.option("--seed", default=0, show_default=True, help="Of the draws.")
@click.option("--stop", multiple=True, metavar="TEXT", help="End before this text; repeatable.")
@click.option("--tokenizer", help="A directory with a tokenizer.json, or bytes.")
@click.option("--no-echo", is_flag=True, help="Print what is new without the prompt.")
def generate(
    directory: Path,
    prompt: str,
    max_tokens: int,
    temperature: float,
    top_k: int | None,
    top_p: float,
    seed: int,
    stop: tuple[str, ...],
    tokenizer: str | None,
    no_echo: bool,
) -> None:
    """Go on from a prompt with the model in DIRECTORY: a run, a checkpoint of one, or any Hugging
    Face decoder. The text appears as it is made."""
    from outsize.api import generate as go_on
    from outsize.checkpoint import hub
    from outsize.data import check_vocabulary, open_tokenizer
    from outsize.decode.samplers import Sampling
    from outsize.train.directory import model_directory

    Sampling(temperature, top_k, top_p, seed)  # refused before anything is read
    found = model_directory(directory)
    text = open_tokenizer(tokenizer or str(found))
    check_vocabulary(text, hub.read_config(found).vocab)
    model = hub.load(found)
    if not no_echo:
        click.echo(prompt, nl=False)
    go_on(
        model,
        prompt,
        max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        stop=stop,
        tokenizer=text,
        on_text=lambda piece: click.echo(piece, nl=False),
    )
    click.echo()
