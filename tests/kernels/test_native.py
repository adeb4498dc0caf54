"""The fused C++ passes against their plain twins, and how they are built, kept and done without."""

from __future__ import annotations

import itertools
import logging
import math
import os
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from outsize.errors import OutsizeError
from outsize.kernels import accumulate, building, gate, loss, native, norm, rope
from outsize.kernels.entropy import greatest
from outsize.kernels.loss import Head, Targets, chunked_loss
from outsize.memory import Ledger

COMPILER = shutil.which("g++")
pytestmark = pytest.mark.skipif(COMPILER is None, reason="no g++ on PATH")
BOTH = (torch.float32, torch.bfloat16)
OPS = torch.ops.outsize
# Units in the last place (above a power of two) that a result may lie from a float64 reference.
ULPS = {torch.float32: 4.0, torch.bfloat16: 0.51}


@pytest.fixture
def cache() -> Path:
    """Of the session: whoever comes first builds what is kept there."""
    return Path(os.environ["XDG_CACHE_HOME"]) / "outsize" / "kernels"


@pytest.fixture
def quick_build(monkeypatch) -> None:
    """How a build is kept does not depend on what is built: one source, not optimised."""
    monkeypatch.setattr(building, "_FLAGS", ("-O0", *(f for f in building._FLAGS if f != "-O3")))
    monkeypatch.setattr(native, "_LIBRARIES", {"passes": building.Library(("normal",))})


@pytest.fixture(autouse=True)
def built():
    """The session's build."""
    found = native.library()
    assert found is not None
    with torch.no_grad():
        yield found


def near(got, exact, terms=None):
    """Within ULPS of a float64 reference. An ulp is that of the largest element of a row, or of
    `terms` where they cancel; half precision rounds once, from a float32 that has its own."""
    size = (exact if terms is None else terms).abs().amax(-1, keepdim=True)
    unit = torch.finfo(got.dtype).eps * ULPS[got.dtype] + torch.finfo(torch.float32).eps * 4
    return bool(((got.double() - exact).abs() <= unit * size).all())


SHAPES = [(1, 1), (1, 384), (7, 33), (67, 1027), (97, 130)]  # (67, 1027): two parts


@pytest.mark.parametrize(("dtype", "shape", "threads"), [*itertools.product(BOTH, SHAPES, [1, 2])])
def test_rms_norm_is_its_twin(dtype, shape, threads):
    torch.set_num_threads(threads)
    for weight_dtype in {dtype, torch.float32}:
        x, g = torch.randn(2, *shape).to(dtype)
        weight = torch.randn(shape[1]).to(weight_dtype)
        exact = [t.double() for t in (x, weight)]
        y, inverse = OPS.rms_norm(x, weight, 1e-6, 1.0)
        y_twin, inverse_twin = norm.plain(*exact, 1e-6, 1.0)
        assert y.dtype == dtype and inverse.dtype == torch.float32
        assert near(y, y_twin) and near(inverse, inverse_twin)
        gx, gweight = OPS.rms_norm_backward(g, x, weight, inverse, 1.0, True, True)
        twins = norm.plain_backward(g.double(), *exact, inverse_twin, 1.0, True, True)
        assert gx.dtype == dtype and gweight.dtype == weight_dtype
        assert near(gx, twins[0], inverse_twin * g.double().abs() * (weight.double() + 1).abs())
        terms = (g.double() * x.double() * inverse_twin).norm(dim=0)
        assert near(gweight, twins[1], torch.maximum(terms, twins[1].abs()))
        assert torch.equal(OPS.rms_norm_backward(g, x, weight, inverse, 1.0, True, False)[0], gx)
        alone = OPS.rms_norm_backward(g, x, weight, inverse, 1.0, False, True)
        assert torch.equal(alone[1], gweight) and alone[0].numel() == 0


@pytest.mark.parametrize(
    ("dtype", "interleaved", "sign", "size"),
    [*itertools.product(BOTH, [False, True], [1, -1], [6, 75])],
)
def test_a_turn_is_its_twin_also_of_strided_heads(dtype, interleaved, sign, size):
    torch.set_num_threads(2)
    tokens, heads, pairs = 501, 3, 3 if size == 6 else 32
    cos, sin = torch.randn(2, tokens, pairs).double().cos().float()
    wide = torch.randn(heads, tokens, size + 2).to(dtype)
    for x in (torch.randn(tokens, heads, size).to(dtype), wide.transpose(0, 1)[..., :size]):
        y = OPS.turn(x, cos, sin, interleaved, sign)
        assert y.is_contiguous() and rope._fused(x, cos, sin)
        assert near(y, rope.plain(x.double(), cos.double(), sin.double(), interleaved, sign))
        assert torch.equal(y[..., 2 * pairs :], x[..., 2 * pairs :])


@pytest.mark.parametrize(("dtype", "count"), [*itertools.product(BOTH, [1, 63, 100_003])])
def test_the_gate_is_its_twin(dtype, count):
    torch.set_num_threads(2)
    x, up, g = (torch.randn(3, count, 1) * 8).to(dtype)
    exact = [t.double() for t in (x, up)]
    assert near(OPS.gate(x, up), gate.plain(*exact, gate.SILU))
    twins = gate.plain_backward(g.double(), *exact, gate.SILU)
    ggate, gup = OPS.gate_backward(g, x, up)
    # The slope of SiLU is the sum of two terms, which cancel near its minimum.
    terms = g.double() * up.double() * torch.maximum(exact[0].abs(), torch.ones(())) + twins[0]
    assert near(ggate, twins[0], terms) and near(gup, twins[1])


@pytest.mark.parametrize(
    ("dtype", "rows", "size", "threads"),
    [*itertools.product(BOTH, [1, 37], [2, 1025, 5000], [1, 2])],
)
@pytest.mark.parametrize("weighed", [False, True])
def test_cross_entropy_is_its_twin(dtype, rows, size, threads, weighed):
    torch.set_num_threads(threads)
    logits = (torch.randn(rows, size) * 4).to(dtype)
    targets = torch.randint(0, size, (rows,))
    targets[1::5] = -100
    factor, weights = 0.125, None
    if weighed:
        weights = torch.rand(rows) + 0.5
        weights[2::5] = 0.0
    expected = logits.double()
    total = loss.plain(expected, Targets(targets, weights), factor, True)
    got = logits.clone()
    assert abs(float(OPS.cross_entropy(got, targets, factor, True, weights) / total) - 1) < 3e-7
    own = factor * (torch.ones(rows) if weights is None else weights).unsqueeze(1)
    assert near(got, expected, own)
    assert not got[targets == -100].any() and not got[own.squeeze(1) == 0].any()
    again = OPS.cross_entropy(logits.clone(), targets, factor, False, weights)
    assert abs(float(again / total) - 1) < 3e-7


@pytest.mark.parametrize("dtype", BOTH)
def test_a_loss_without_any_target_is_zero(dtype):
    logits, targets = torch.randn(3, 9).to(dtype), torch.full((3,), -100)
    assert float(OPS.cross_entropy(logits, targets, 1.0, True)) == 0.0 and not logits.any()


def test_a_target_outside_the_vocabulary_is_named():
    for target in (9, -1):
        with pytest.raises(OutsizeError, match=f"target {target} is no token of a vocabulary of 9"):
            OPS.cross_entropy(torch.randn(2, 9), torch.tensor([3, target]), 1.0, True)


@pytest.mark.parametrize("dtype", BOTH)
def test_accumulating_is_addition(dtype):
    torch.set_num_threads(2)
    total, x = torch.randn(3, 20_001), torch.randn(3, 20_001).to(dtype)
    expected = total + x
    accumulate.accumulate(total, x)
    assert torch.equal(total, expected)


@pytest.mark.parametrize("dtype", BOTH)
def test_what_is_not_a_number_stays_so(dtype):
    x = torch.ones(2, 40).to(dtype)
    x[0, 7], x[1, 7] = float("nan"), float("inf")
    assert OPS.rms_norm(x, x[0] * 0 + 1, 1e-6, 0.0)[0].isnan().any(-1).all()
    ones = torch.ones_like(x)
    gated = OPS.gate(x, ones)
    assert gated[0, 7].isnan() and gated[1, 7].isposinf() and gated.isfinite().sum() == 78
    assert OPS.cross_entropy(x.clone(), torch.tensor([3, -100]), 1.0, True).isnan()


def test_exponentials_are_within_an_ulp(built):
    x = np.unique(np.linspace(-87, 88, 300_001).astype(np.float32))
    y = np.empty_like(x)
    built.outsize_exponential(x.ctypes.data, y.ctypes.data, x.size)
    exact = np.exp(x.astype(np.float64))
    assert (np.abs(y - exact) <= 1.0 * np.spacing(exact.astype(np.float32))).all()
    ends = np.array([-np.inf, -87.5, 0, np.nan, np.inf], np.float32)
    y = np.empty_like(ends)
    built.outsize_exponential(ends.ctypes.data, y.ctypes.data, ends.size)
    assert y[:3].tolist() == [0, 0, 1] and np.isnan(y[3]) and y[4] > 1e38


@pytest.mark.parametrize("threads", [1, 2])
def test_a_gradient_is_bitwise_the_same_every_time(threads):
    torch.set_num_threads(threads)
    x, g = torch.randn(2, 999, 96)
    weight = torch.randn(96)
    inverse = OPS.rms_norm(x, weight, 1e-6, 0.0)[1]
    first, *others = (
        OPS.rms_norm_backward(g, x, weight, inverse, 0.0, True, True)[1] for _ in range(5)
    )
    assert all(torch.equal(first, other) for other in others)


def parts(dtype, fake: bool):
    """Loss and gradients of every pass in a row, with the bytes that a ledger saw at each."""
    with FakeTensorMode() if fake else torch.no_grad(), torch.enable_grad():
        torch.manual_seed(3)
        x = torch.randn(6, 4, 8).to(dtype).requires_grad_()
        weight, head = torch.randn(8).to(dtype).requires_grad_(), torch.randn(30, 32).to(dtype)
        cos, sin = torch.randn(2, 6, 3)
        head.requires_grad_()
        targets = torch.full((6,), 5)
        ledger, seen = Ledger(), []

        def sink(weight, compute):
            seen.append((ledger.total, ledger.peak))

        with ledger:
            y = rope.turn(norm.rms_norm(x, weight, 1e-5, 0.0), cos, sin, False)
            y = gate.gated(y, x, gate.SILU)
            seen.append((ledger.total, ledger.peak))
            made = chunked_loss(y.flatten(1), head, None, Targets(targets), Head(0.5, 4, sink))
            made.backward()
            seen.append((ledger.total, ledger.peak))
        return seen, (made.detach(), x.grad, weight.grad)


@pytest.mark.parametrize("dtype", [*BOTH, torch.float64])
def test_fake_tensors_allocate_what_real_ones_do(dtype):
    assert parts(dtype, fake=True)[0] == parts(dtype, fake=False)[0]


def test_passes_together_give_the_numbers_of_their_twins(monkeypatch):
    fused = parts(torch.float32, fake=False)[1]
    exact = parts(torch.float64, fake=False)[1]
    monkeypatch.setattr(native, "library", lambda: None)
    plain = parts(torch.float32, fake=False)[1]
    for a, b, c in zip(fused, plain, exact, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(a.double(), c, rtol=1e-5, atol=1e-6)
    assert not all(torch.equal(a, b) for a, b in zip(fused, plain, strict=True))  # both ways ran


def test_passes_are_operators_for_who_sees_operators():
    x = torch.randn(4, 8)
    assert native.bare(x) and not native.bare(x.to("meta"))
    alone = gate.gated(x, x, gate.SILU)
    with torch.profiler.profile() as watching:
        profiled = gate.gated(x, x, gate.SILU)
    assert "outsize::gate" in {one.name for one in watching.events()}
    with Ledger() as ledger:
        counted = gate.gated(x, x, gate.SILU)
    assert ledger.peak == x.nbytes
    assert torch.equal(profiled, alone) and torch.equal(counted, alone)
    with FakeTensorMode():
        assert not native.bare(torch.empty(2))
    x = FakeTensorMode().from_tensor(x)
    assert not native.bare(x) and type(gate.gated(x, x, gate.SILU)) is type(x)


def test_twins_serve_what_the_passes_do_not():
    x = torch.randn(4, 6)
    assert native.fits(x)
    refused = (x.double(), x.half(), x.to("meta"), x.t(), x[:, :3], x.to_sparse())
    assert not any(native.fits(t) for t in refused)
    assert not native.fits(x, x.bfloat16())
    with torch.enable_grad():  # a backward pass that is itself differentiated
        assert not native.fits(x)
    norm.rms_norm(x.t(), torch.ones(4), 1e-6, 0.0)
    gate.gated(x.t(), x.t(), gate.SILU)
    rope.turn(torch.randn(4, 6, 2).transpose(1, 2), torch.ones(4, 3), torch.ones(4, 3), True)


def test_a_gradient_of_a_gradient_is_refused_and_never_wrong():
    """The passes have no derivative: a second one would leave them out."""
    with torch.enable_grad():
        x = torch.randn(3, 8, requires_grad=True)
        for y in (norm.rms_norm(x, torch.ones(8), 1e-6, 0.0), gate.gated(x, x, gate.SILU)):
            (first,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
            with pytest.raises(RuntimeError):
                first.sum().backward()


@pytest.fixture
def warned() -> Iterator[list[str]]:
    """What is warned of while kernels are loaded."""
    said = list[str]()
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())
    log = logging.getLogger(native.__name__)
    log.addHandler(handler)
    yield said
    log.removeHandler(handler)


def test_without_a_compiler_there_is_one_warning_and_the_twins(cache, warned):
    assert native.load(None, cache) is None
    (said,) = warned
    assert "no C++ compiler" in said and "g++" in said


def test_a_compiler_that_fails_is_a_warning(tmp_path, warned):
    broken = tmp_path / "c++"
    broken.write_text("#!/bin/sh\n[ $1 = --version ] || { echo no such luck >&2; exit 3; }\n")
    broken.chmod(0o755)
    assert native.load(str(broken), tmp_path) is None
    assert native.load(str(tmp_path / "absent"), tmp_path) is None
    assert "status 3: no such luck" in warned[0]
    assert list(tmp_path.glob("*.so")) == []


@pytest.mark.usefixtures("quick_build")
def test_a_damaged_cache_is_built_again(tmp_path):
    assert native.load(COMPILER, tmp_path) is not None
    (kept,) = tmp_path.iterdir()
    whole = kept.read_bytes()
    for damage in (b"", whole[: len(whole) // 2], whole[:5000] + b"?" + whole[5001:]):
        kept.unlink()  # this process has the file that was there
        kept.write_bytes(damage)
        assert building.whole(kept) is None
    assert native.load(COMPILER, tmp_path) is not None
    assert building.whole(kept) is not None and sorted(tmp_path.iterdir()) == [kept]


def test_a_kept_library_needs_no_build(cache, monkeypatch):
    monkeypatch.setattr(building, "_compile", lambda *_: pytest.fail("built again"))
    assert native.load(COMPILER, cache) is not None


@pytest.mark.usefixtures("quick_build")
def test_a_cache_that_cannot_be_written_is_no_error(tmp_path):
    (tmp_path / "file").write_text("in the way")
    assert native.load(COMPILER, tmp_path / "file" / "kernels") is not None


@pytest.mark.usefixtures("quick_build")
def test_builds_at_once_do_not_meet(tmp_path):
    with ThreadPoolExecutor(2) as pool:  # each runs a compiler of its own
        both = [pool.submit(native.load, COMPILER, tmp_path) for _ in range(2)]
    assert all(future.result() is not None for future in both)
    (kept,) = tmp_path.iterdir()
    assert building.whole(kept) is not None


@pytest.mark.usefixtures("quick_build")
def test_a_library_is_built_when_it_is_asked_for(tmp_path, monkeypatch):
    libraries = {
        "passes": building.Library(("normal",)),
        "shared": building.Library(("sparse",), needs=("passes",)),
    }
    monkeypatch.setattr(native, "_LIBRARIES", libraries)
    found = native.load(COMPILER, tmp_path)
    (first,) = tmp_path.iterdir()
    monkeypatch.setattr(native, "library", lambda: found)
    with monkeypatch.context() as patch:
        patch.setattr(building, "_compile", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
        with pytest.raises(
            OutsizeError, match="'shared' cannot be built as others were: disk full"
        ):
            native.load_named("shared")
    native.load_named("shared", "float16")
    assert len(set(tmp_path.iterdir()) - {first}) == 1
    libraries["shared"] = building.Library(("sparse", "normal"))  # what else it holds, by its name
    assert not building.Libraries(libraries, COMPILER, tmp_path)._kept("shared")
    assert building.Libraries(libraries, COMPILER, tmp_path)._kept("passes")
    monkeypatch.setattr(building, "processor", lambda: "another")  # whose instructions are others
    assert not building.Libraries(libraries, COMPILER, tmp_path)._kept("passes")


@pytest.mark.usefixtures("quick_build")
def test_a_library_serves_other_environments(tmp_path, monkeypatch):
    """With the same PyTorch elsewhere nothing is compiled, and no path of the first is needed."""
    package = Path(torch.__file__).parent
    assert native.load(COMPILER, tmp_path / "kernels") is not None
    (kept,) = (tmp_path / "kernels").iterdir()
    assert str(package).encode() not in kept.read_bytes()
    for path in building.runtimes():
        there = tmp_path / Path(path).relative_to(package.parent)
        there.parent.mkdir(parents=True)
        shutil.copy(path, there)
    with monkeypatch.context() as patch:  # not while the test's end looks for the runtime
        patch.setattr(torch, "__file__", str(tmp_path / "torch" / "__init__.py"))
        patch.delattr(building, "_compile")
        assert native.load(COMPILER, tmp_path / "kernels") is not None


def test_one_pool_of_threads():
    """The passes use the OpenMP runtime that PyTorch loaded, not a second one."""
    maps = Path("/proc/self/maps").read_text()
    runtimes = {line.split()[-1] for line in maps.splitlines() if "libgomp" in line}
    assert len(runtimes) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_first_of_the_largest_is_found_as_argmax_does(dtype: torch.dtype) -> None:
    """Ties, zeros of either sign, infinities, and what is no number, of either sign too."""
    draw = torch.Generator().manual_seed(0)
    rows = [torch.randn(count, generator=draw).to(dtype) for count in (1, 7, 1024, 1025, 4099)]
    rows += [torch.randint(-2, 3, (3000,), generator=draw).to(dtype) for _ in range(3)]
    rows += [torch.tensor(some, dtype=dtype) for some in ((-0.0, 0.0), (-1.0, -0.0, 0.0, -0.0))]
    for value in (math.inf, math.nan, -math.nan, -math.inf):
        for places in ((1500,), (2000, 40), tuple(range(3000))):
            rows.append(torch.randn(3000, generator=draw).to(dtype))
            rows[-1][list(places)] = value
    with torch.no_grad():
        for row in rows:
            assert greatest(row) == int(row.argmax())
