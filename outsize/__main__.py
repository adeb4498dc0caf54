"""`python -m outsize` is `outsize`."""

from outsize.cli.main import main

main(prog_name="outsize")
