"""Programs of several workers, damaged at random: each is refused by the prover, or run by all of
its workers (as threads) and found exact, two steps long. By hand, for more than CI has time for:

    python benchmarks/mutations.py 10000

Prints counts by plan: refused where one list is played alone, refused where all are played
together, run and exact. A damaged program that runs and is not exact, or a plan whose programs
stand still, ends it with exit code 1.
"""

from __future__ import annotations

import faulthandler
import sys
import time
from collections import Counter
from pathlib import Path
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

from mutants import NAMES, PIECE, cases, judged

PATIENCE = 3600  # seconds after which a plan's programs stand still


def main() -> int:
    """Damage as many programs as are asked for, over all plans."""
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
    seed = sys.argv[2] if len(sys.argv) > 2 else "by hand"
    total: Counter[str] = Counter()
    small = {
        "outsize.runtime.spill.LEAST": 64,
        "outsize.plan.plan.PART": PIECE,
        "outsize.memory.store.BLOCK": 2 * PIECE,
    }
    patches = [patch(name, value) for name, value in small.items()]
    for each in patches:
        each.start()
    for place, name in enumerate(NAMES):
        share = count * (place + 1) // len(NAMES) - count * place // len(NAMES)
        faulthandler.dump_traceback_later(PATIENCE, exit=True)
        begin = time.perf_counter()
        found = judged(cases()[name], share, f"{seed} {name}")
        total += found
        print(f"{name}: {_shown(found)}; {time.perf_counter() - begin:.1f} s", flush=True)
    print(f"all {sum(total.values())}: {_shown(total)}")
    return 0


def _shown(found: Counter[str]) -> str:
    return (
        f"{found['alone']} refused alone, {found['together']} refused together,"
        f" {found['exact']} exact"
    )


if __name__ == "__main__":
    sys.exit(main())
