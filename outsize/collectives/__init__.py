"""What workers say to one another: meshes, groups, sums and gathers over a mesh axis."""

from typing import TYPE_CHECKING

from outsize.lazy import importing

if TYPE_CHECKING:
    from outsize.collectives.axes import AXES, Axis, axis_of
    from outsize.collectives.collective import Alone, Collective, Operation, Span
    from outsize.collectives.joined import Joined, from_environment, join, meeting
    from outsize.collectives.mesh import Mesh, from_device_mesh, parse_mesh, to_device_mesh
    from outsize.collectives.pretend import Pretend, PretendWorld
    from outsize.collectives.world import (
        Lone,
        Use,
        World,
        along,
        everyone,
        inside,
        received,
        together,
    )

__getattr__ = importing(__name__)
