"""`python -m outsize` is `outsize`."""

from outsize.cli.entry import main

main()
