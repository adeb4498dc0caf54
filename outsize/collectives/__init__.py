"""What workers say to one another: meshes, groups, sums and gathers over a mesh axis."""

from outsize.collectives.collective import Alone, Collective, Operation, Span
from outsize.collectives.joined import Joined, from_environment, join, meeting
from outsize.collectives.mesh import AXES, Mesh, parse_mesh
from outsize.collectives.pretend import Pretend, PretendWorld
from outsize.collectives.world import Lone, Use, World, along, everyone

__all__ = [
    "AXES",
    "Alone",
    "Collective",
    "Joined",
    "Lone",
    "Mesh",
    "Operation",
    "Pretend",
    "PretendWorld",
    "Span",
    "Use",
    "World",
    "along",
    "everyone",
    "from_environment",
    "join",
    "meeting",
    "parse_mesh",
]
