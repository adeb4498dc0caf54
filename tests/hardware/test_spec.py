"""Clusters from one line, against counts and rates worked out by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from outsize.errors import OutsizeError
from outsize.hardware import catalogue, parse_spec
from outsize.hardware.form import dumps

GIB = 2**30


@pytest.mark.parametrize(
    ("text", "devices", "nodes", "inside", "outside"),
    [
        ("8xH100-SXM", 8, 1, 450e9, None),
        ("h100-sxm", 1, 1, 450e9, None),
        ("128 x 8 A100-SXM-80 @ 25GB/s", 1024, 128, 300e9, 25e9),
        ("128 x 8 A100-SXM-80 @ 200Gb/s", 1024, 128, 300e9, 25e9),
        ("384 x 8 MI250X-GCD", 3072, 384, 50e9, 12.5e9),
        ("16xH100-SXM", 16, 2, 450e9, 50e9),
        ("72xGB200", 72, 1, 900e9, None),
        ("4 x 1 RTX-4090 @ 1GB/s", 4, 4, 32e9, 1e9),
    ],
)
def test_machines(
    text: str, devices: int, nodes: int, inside: float, outside: float | None
) -> None:
    made = parse_spec(text)
    (group,) = made.groups
    assert (made.count, made.nodes) == (devices, nodes)
    assert group.levels[0].bandwidth.value == pytest.approx(inside)
    if outside is not None:
        assert group.levels[-1].bandwidth.value == pytest.approx(outside)


def test_a_torus_uses_the_links_of_its_dimensions() -> None:
    """1,200 GB/s both ways over six links: 600 one way over three dimensions, 400 over two."""
    whole, flat = parse_spec("TPU-v5p 4x4x8"), parse_spec("TPU-v5p 4x4")
    assert (whole.count, whole.groups[0].levels[0].dims) == (128, (4, 4, 8))
    assert whole.groups[0].levels[0].bandwidth.value == pytest.approx(600e9)
    assert flat.groups[0].levels[0].bandwidth.value == pytest.approx(400e9)
    assert parse_spec("3 x 16 TPU-v5p 4x4").count == 48


def test_tiers_and_unlike_devices() -> None:
    laptop = parse_spec("RTX-4090 + 64GiB host + disk 5GB/s")
    host, disk = laptop.tiers
    assert (host.name, host.bytes, disk.name) == ("host", 64 * GIB, "disk")
    assert disk.read is not None and disk.read.value == 5e9
    mixed = parse_spec("2 x 8 H100-SXM + 4 x 8 A100-SXM-80 @ 12.5GB/s")
    assert (mixed.count, mixed.nodes, mixed.alike) == (48, 6, False)
    assert {group.levels[-1].bandwidth.value for group in mixed.groups} == {12.5e9}
    with pytest.raises(OutsizeError, match="expected one kind"):
        mixed.hardware()


def test_a_host_has_a_rate_of_its_link_and_one_of_its_memory() -> None:
    """Each is said or not, the size before or after its name."""
    for text, link, own in (
        ("64GiB host", None, None), ("host 64GiB 25GB/s", 25e9, None),
        ("64GiB host memory 80GB/s", None, 80e9), ("64GiB host 25GB/s memory 640Gb/s", 25e9, 80e9),
    ):  # fmt: skip
        (host,) = parse_spec(f"RTX-4090 + {text}").hardware().tiers[1:]
        rates = (host.read, host.write, host.own)
        assert [rate and rate.value for rate in rates] == [link, link, own], text
        assert host.bytes == 64 * GIB


def test_machines_of_files_are_unlike_where_their_rates_are(tmp_path: Path) -> None:
    made = catalogue("H100-SXM")
    device = made.devices[0]
    half = replace(device, bandwidth=replace(device.bandwidth, value=1e12))
    for name, one in (("a", device), ("b", half)):
        (tmp_path / f"{name}.yaml").write_text(dumps(replace(made, devices=(one,))))
    a, b = tmp_path / "a.yaml", tmp_path / "b.yaml"
    assert parse_spec(f"{a} + {a}").alike
    mixed = parse_spec(f"{a} + {b} @ 1GB/s")
    assert (mixed.count, mixed.nodes, mixed.alike) == (2, 2, False)
    assert {group.levels[-1].bandwidth.value for group in mixed.groups} == {1e9}


def test_hardware_of_a_cluster_is_one_node_and_its_links() -> None:
    made = parse_spec("4 x 8 H100-SXM + 1TiB host @ 50GB/s")
    hardware = made.hardware()
    assert hardware.devices[0].count == 8
    assert [link.between for link in hardware.links] == ["devices", "nodes"]
    assert hardware.tier("host").bytes == 2**40


def test_a_file_has_measured_rates_and_prices(tmp_path: Path) -> None:
    path = tmp_path / "two.yaml"
    path.write_text("spec: 2 x 4 H100-SXM\nrates: [[0, 20], [10, 0]]\nprice: 2.5\nwatts: 650\n")
    made = parse_spec(str(path))
    assert (made.rates[0][1], made.rates[1][0]) == (20e9, 10e9)
    device = made.groups[0].device
    assert device.price is not None and (device.price.value, device.price.unit) == (2.5, "money/h")
    assert device.watts is not None and device.watts.value == 650


def test_a_file_that_names_itself_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "again.yaml"
    path.write_text(f"spec: 2 x {path}\n")
    with pytest.raises(OutsizeError, match="is a file; expected devices"):
        parse_spec(str(path))


@pytest.mark.parametrize("text", ["8XH100-sxm", " 8 x h100-SXM ", "8×H100-SXM", "8 H100-SXM"])
def test_case_and_spaces_say_nothing(text: str) -> None:
    assert parse_spec(text) == parse_spec("8xH100-SXM")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("8xH100-SXN", "did you mean 'H100-SXM'"),
        ("8xh100", "did you mean 'H100-SXM' or 'H100-SXM-96' or 'H100-PCIe'?"),
        ("8xH200-SXM", "did you mean 'H200'?"),
        ("0xH100-SXM", "a count of 0"),
        ("2 x 0 H100-SXM", "a count of 0"),
        ("2 x 8 H100-SXM @ 25", "'25' has no unit; expected as 25GB/s"),
        ("2 x 8 H100-SXM @ fast", "is not a number with a unit"),
        ("2 x 8 H100-SXM @ 0GB/s", "expected more than 0"),
        ("8xH100-SXM @ 25GB/s", "one machine has no rate to others"),
        ("RTX-4090 + 64 host", "host memory '64' has no unit"),
        ("RTX-4090 + 64GiB host memory 80", "rate of the host's own memory '80' has no unit"),
        ("RTX-4090 + 64GiB host 25GB/s 80GB/s", "expected as '64GiB host 25GB/s memory 100GB/s'"),
        ("RTX-4090 + host memory 80GB/s", "expected as '64GiB host 25GB/s memory 100GB/s'"),
        ("RTX-4090 + disk 5", "disk '5' has no unit"),
        ("RTX-4090 + disk", "expected a rate"),
        ("64GiB host", "names no device"),
        ("H100-SXM + 1GiB host + 2GiB host", "expected each once"),
        ("128 x TPU-v5p 4x4x4", "a torus 4x4x4 has 64 chips; expected 128"),
        ("TPU-v5e 2x2x2", "has 3 dimensions; TPU-v5e has 2"),
        ("TPU-v5p 4x0x4", "a count of 0"),
        ("H100-SXM 2x2", "has no torus"),
        ("12xH100-SXM", "no whole machines of 8"),
        ("", "is no device"),
        ("8", "is no device"),
        ("2 x 2 x 2 H100-SXM", "has 3 counts; at most 2"),
    ],
)
def test_bad_specs_are_one_clear_line(text: str, said: str) -> None:
    with pytest.raises(OutsizeError) as caught:
        parse_spec(text)
    assert said in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("rates", "said"),
    [
        ("[[0, 1], [1]]", "bad.yaml: rates: row 1 has 1 entries of 2; expected a square matrix"),
        ("[[0, 1], [0, 0]]", "bad.yaml: rates: from 1 to 0 is 0 GB/s; expected more than 0"),
        ("[[0, -4], [1, 0]]", "bad.yaml: rates: from 0 to 1 is -4 GB/s; expected more than 0"),
        ("[[0]]", "bad.yaml: rates: a matrix of 1 nodes; expected 2"),
    ],
)
def test_bad_matrices(tmp_path: Path, rates: str, said: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(f"spec: 2 x 4 H100-SXM\nrates: {rates}\n")
    with pytest.raises(OutsizeError, match=said.replace("[", r"\[")):
        parse_spec(str(path))


def test_a_file_with_a_negative_price(tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text("spec: 8xH100-SXM\nprice: -1\n")
    with pytest.raises(OutsizeError, match=r"price is -1\.0; expected more than 0"):
        parse_spec(str(path))
