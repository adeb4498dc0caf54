"""Claim: gradients summed in buckets behind each stage's backward pass cost little time.

Li et al., "PyTorch Distributed", 2020 (sections 3.2.3 and 5.1), and the data part of Narayanan et
al., "Efficient Large-Scale Language Model Training on GPU Clusters", 2021. Buckets are stages here.
Real: two workers whose sums take as long as over a link that is slow on purpose (they wait), with
the sums where the schedule has them and all of them behind the backward pass: how much of them is
hidden, how much a step gains, and that the weights are the same bit for bit. Simulated: the shape
of BERT-large on the paper's 4 servers of 8 V100 and one 100 Gb/s card, over rows of a worker, and
weak scaling to the 256 devices of the paper's largest run.
"""

from __future__ import annotations

import sharded
from verdict import Figure, conclude

from outsize.collectives import Mesh
from outsize.hardware import Hardware
from outsize.plan import Plan, Precision, Sharding
from outsize.schedule.talk import Spoken
from outsize.simulate import Forecast
from outsize.simulate.forecast import Clock
from outsize.simulate.replay import play

CONFIG = sharded.llama(256, 6, 4, 1024, 688)
RATE = 70e6  # bytes a second of the slow link
BERT = sharded.llama(1024, 24, 16, 30522, 4096)  # 335M parameters in its blocks and table
REACHED = 0.35  # of a V100's peak
GAIN = 0.35  # of a step with BERT on 32 devices, by overlap


def real() -> tuple[bool, float, float]:
    """Whether weights are equal; the share of the sums that is hidden; what a step gains."""
    plan = sharded.plan_of(
        CONFIG, Mesh(2), Sharding(), 4, 128, precision=Precision.named("float32")
    )
    ways = (None, sharded.sums_last)
    works = [sharded.Steps(CONFIG, plan, 5, RATE, way) for way in ways]
    overlapped, last = sharded.run(*works)
    same = overlapped[0].apart(last[0]) == 0 and overlapped[1].apart(overlapped[0]) == 0
    seconds, share = sharded.hidden(overlapped[0].trace)
    gain = last[0].seconds / overlapped[0].seconds - 1
    print(
        f"  2 real workers, link of {RATE / 1e6:.0f} MB/s: sums take {seconds:.2f} s, {share:.0%}"
        f" of it under the passes (behind them {sharded.hidden(last[0].trace)[1]:.0%}); a step"
        f" {last[0].seconds:.2f} to {overlapped[0].seconds:.2f} s ({gain:+.0%}); equal weights:"
        f" {same}"
    )
    return same, share, gain


def servers() -> Hardware:
    """Servers of 8 V100 whose one card of 100 Gb/s they share."""
    return sharded.cluster("V100-SXM2-32", 8, REACHED, network=12.5 / 8, wait=20e-6)


def plan_of(workers: int, rows: int) -> Plan:
    return sharded.plan_of(
        BERT, Mesh(workers), Sharding(), rows, 512, precision=Precision.named("bfloat16")
    )


def behind(made: Forecast, forecaster: sharded.Predicted, hardware: Hardware) -> float:
    """Seconds of the same step with all sums behind the backward pass."""
    costs = forecaster.costs(made.plan)
    placement = costs.facts.placement(made.plan)
    says = Spoken(placement.items, 0, inside=costs.said).says(made.schedule)
    clock = Clock(placement, costs, hardware, says)
    places = {action.key: i for i, action in enumerate(made.schedule.workers[0])}
    late = sharded.sums_last(made.schedule)
    return play(late, made.static, lambda _, a: clock.seconds(places[a.key], a)).span()


def simulated() -> tuple[float, float]:
    """The largest gain of overlap on 32 devices; throughput kept from 8 to 256 devices."""
    forecaster, gains = sharded.Predicted(BERT, Precision.named("bfloat16")), []
    for rows in (4, 8, 16, 32):
        made = forecaster.of(plan_of(32, rows), servers())
        gains.append(behind(made, forecaster, servers()) / made.seconds - 1)
        print(
            f"  (simulated) 32 V100, {rows} rows of 512 a worker: a step"
            f" {made.seconds * 1e3:.0f} ms, {sharded.hidden(made.trace)[1]:.0%} of the sums hidden,"
            f" {gains[-1]:+.0%} by overlap"
        )
    one, all_ = (forecaster.of(plan_of(n, 32), servers()).seconds for n in (8, 256))
    print(f"  (simulated) 256 V100 keep {one / all_:.0%} of the speed of 8, at 32 rows a worker")
    return max(gains), one / all_


def main() -> None:
    same, share, gain = real()
    most, kept = simulated()
    conclude(
        'Li et al., "PyTorch Distributed", 2020; Narayanan et al., 2021 (data parallelism)',
        "overlap makes steps of BERT 35% faster on 32 devices, near-linear scaling to 256",
        f"real: {share:.0%} of the sums hidden, {gain:+.0%} by overlap, equal weights; (simulated)"
        f" up to {most:+.0%} on 32 V100, {kept:.0%} of linear at 256",
        f"real: Llama of {len(CONFIG.layers)} layers, hidden 256, float32, 1 thread a worker, sums"
        f" that wait for a link of {RATE / 1e6:.0f} MB/s; simulated: 24 layers of hidden 1024 at"
        f" {REACHED:.0%} of a V100's peak, float32 gradients, 1.56 GB/s and 20 us between servers",
        Figure(
            "gain of BERT by overlap on 32 devices", most, GAIN, "%", nothing=0.0, how="simulated"
        ),
        Figure(
            "gain by overlap over a slow link",
            gain,
            GAIN,
            "%",
            nothing=0.0,
            how="emulated links",
            timed=True,
            other=f"2 workers and a link of {RATE / 1e6:.0f} MB/s",
        ),
        Figure(
            "speed kept from 8 to 256 devices", kept, 1.0, "%", nothing=8 / 256, how="simulated"
        ),
        holds={"weights equal bit for bit": same},
    )


if __name__ == "__main__":
    main()
