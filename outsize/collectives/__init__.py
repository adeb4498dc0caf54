"""What workers say to one another: sums and gathers over a mesh axis."""

from outsize.collectives.collective import Alone, Collective

__all__ = ["Alone", "Collective"]
