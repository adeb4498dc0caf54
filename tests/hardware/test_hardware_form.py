"""Hardware as data: what it refuses, and its round trip through YAML and JSON."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from outsize import typed
from outsize.errors import OutsizeError
from outsize.hardware import (
    Attention,
    Device,
    Hardware,
    Link,
    Matmul,
    Measured,
    Rate,
    Tier,
    catalogue,
    dumps,
    loads,
    names,
    read,
)
from outsize.typed import plain


def rate(value: float, unit: Any = "FLOP/s", **more: Any) -> Rate:
    return Rate(value, unit, "by hand", "2026-01-01", **more)


def example() -> Hardware:
    """Every class, every optional field."""
    measured = Measured(
        matmul=(
            Matmul(8, 16, 32, "fp32", rate(1e9)),
            Matmul(80, 160, 320, "fp32", rate(4e9)),
            Matmul(8, 16, 32, "bf16", rate(1e20, note="ünïcode: 'a'", upto=2e20)),
        ),
        attention=(Attention(512, 6, 64, "fp32", "backward", rate(5e9)),),
        overhead=rate(2e-6, "s"),
    )
    device = Device(
        name="a: device",
        kind="cpu",
        memory=rate(2**34, "B"),
        peak={"fp32": rate(1e11), "int8": rate(2e11, upto=3e11)},
        bandwidth=rate(4e10, "B/s", note="both ways"),
        count=3,
        visible=rate(2**33, "B"),
        measured=measured,
        note="n",
    )
    link = Link("network", "nodes", rate(1e9, "B/s"), rate(1e-5, "s"))
    host = Tier("host", 2**35, own=rate(8e10, "B/s"))
    return Hardware((device,), (Tier("device", 2**33), host, Tier("disk", 0)), (link,), "by hand")


def test_round_trip_through_yaml_and_json(tmp_path: Path) -> None:
    for hardware in (example(), *(catalogue(name, 8) for name in names())):
        assert loads(dumps(hardware)) == hardware
        assert loads(json.dumps(plain(hardware))) == hardware
    path = tmp_path / "h.yaml"
    path.write_text(dumps(example()), encoding="utf-8")
    assert read(path) == example()


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("kind: cpu", "kind: tpu", "devices[0].kind: 'tpu'; expected one of cpu, gpu"),
        ("count: 3", "count: 3.5", "devices[0].count: 3.5; expected a whole number"),
        ("count: 3", "count: true", "devices[0].count: True; expected a whole number"),
        ("count: 3", "count: 0", "count 0"),
        ("count: 3", "cuont: 3", "devices[0].cuont: unknown key; did you mean 'count'?"),
        ("name: device\n  bytes: 8589934592", "name: device\n  bytes: -1", "-1 bytes"),
        ("name: disk", "name: device", "expected each once"),
        ("value: 1.0e-05", "value: .nan", "expected a finite number"),
        ("value: 1.0e-05", "value: -1.0", "expected a positive number"),
        ("value: 1.0e-05", "value: fast", "latency.value: 'fast'; expected a number"),
        ("unit: B/s", "unit: FLOP/s", "expected 'B/s'"),
        ("unit: B/s", "unit: parsecs", "'parsecs'"),
        ("upto: 2.0e+20", "upto: 1.0", "expected at least its value"),
        (
            "source: by hand\n      date",
            "origin: by hand\n      date",
            "origin: unknown key; known: date",
        ),
        ("  bytes: 8589934592\n", "", "tiers[0].bytes: missing; expected a whole number"),
    ],
)
def test_damage_names_the_field(old: str, new: str, says: str) -> None:
    text = dumps(example())
    assert old in text
    with pytest.raises(OutsizeError) as error:
        loads(text.replace(old, new, 1), "h.yaml")
    assert says in str(error.value)
    assert str(error.value).startswith("h.yaml")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("text", ["", "[]", "{", "a: [", "3", "devices: 3"])
def test_what_is_not_hardware_is_refused(text: str) -> None:
    with pytest.raises(OutsizeError, match=r"^h: |^h\.devices: "):
        loads(text, "h")


def test_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OutsizeError, match=r"none\.yaml cannot be read: No such file"):
        read(tmp_path / "none.yaml")


def test_defaults_may_be_left_out() -> None:
    assert "upto" not in plain(rate(3.0), defaults=False)
    assert typed.read(Rate, plain(rate(3.0), defaults=False), "rate") == rate(3.0)


def test_matmul_rate_between_measured_shapes() -> None:
    measured = example().devices[0].measured
    assert measured.matmul_rate(8, 16, 32, "fp32") == 1e9
    assert measured.matmul_rate(80, 160, 320, "fp32") == 4e9
    tokens, d_in, d_out = (round(n * math.sqrt(10)) for n in (8, 16, 32))
    assert measured.matmul_rate(tokens, d_in, d_out, "fp32") == pytest.approx(2e9, rel=0.03)
    far = measured.matmul_rate(8000, 16000, 32000, "fp32")
    assert 2e9 < far < 4e9, "outside it stays within what was measured"
    assert measured.matmul_rate(1, 1, 1, "bf16") == pytest.approx(1e20)
    with pytest.raises(OutsizeError, match="'fp64'"):
        measured.matmul_rate(8, 16, 32, "fp64")


def test_a_plan_counts_on_visible_bytes_else_on_the_lower_end() -> None:
    device = example().devices[0]
    assert device.memory_bytes == 2**33
    assert replace(device, visible=None).memory_bytes == 2**34


def test_tier_by_name() -> None:
    assert example().tier("disk") == Tier("disk", 0)
    with pytest.raises(OutsizeError, match="'hots'"):
        example().tier("hots")


def test_hardware_needs_devices_and_tiers_with_names() -> None:
    with pytest.raises(OutsizeError, match="without devices"):
        Hardware((), (), (), "by hand")
    with pytest.raises(OutsizeError, match="tier 'my tier'; expected a letter"):
        Tier("my tier", 1)
    assert Tier("cxl-2", 1).name == "cxl-2"
    with pytest.raises(OutsizeError, match=r"tier host: own is in 'FLOP/s', expected 'B/s'"):
        Tier("host", 1, own=rate(1e9))
