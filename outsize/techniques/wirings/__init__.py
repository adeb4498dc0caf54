"""Wirings of a decoder's branches, each in a file that is called as its key of config.json."""
