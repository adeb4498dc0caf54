"""Of how many parts of an update how many go over the device, the others where they rest."""

from __future__ import annotations


def shared(over_device: float, at_rest: float, most: int = 64) -> tuple[int, int]:
    """Of how many parts how many should be updated on the device; (0, 1) for all of them.

    over_device: seconds of a part there, the slowest of bringing it, updating it and taking it
    back, which overlap; at_rest: seconds of one updated where it rests. Both go on at once, so n
    parts, k of them on the device, take max(k over_device, (n - k) at_rest); the k and n with the
    least of that for each part. (Maurya et al., "Deep Optimizer States", 2024, balance the same.)
    """
    best, cost = (0, 1), over_device
    for n in range(2, most + 1):
        even = n * at_rest / (over_device + at_rest) if at_rest else 0
        for k in {min(max(1, k), n - 1) for k in (int(even), int(even) + 1)}:
            each = max(k * over_device, (n - k) * at_rest) / n
            if each < cost:
                best, cost = (n, k), each
    return best
