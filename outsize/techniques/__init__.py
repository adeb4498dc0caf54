"""Published techniques, one file each: outsize/every_technique.py imports them all."""
