"""Each private name of PyTorch does what Outsize uses it for; nobody else names one."""

from __future__ import annotations

import re
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed import Backend, HashStore

from outsize import torch_private as private

PACKAGE = Path(private.__file__).parent
NAMED = re.compile(
    r"torch\.(utils\.)?_(?!_version__|_file__)\w|torch\.ops\.aten\._\w|\._cdata\b|\._opt_called\b"
    r"|\._version\b|\._Options\b|_start_coalescing\(\)"
)


def test_no_other_module_names_one():
    own = ("torch_private.py", "torch_later.py")
    files = [f for f in PACKAGE.rglob("*.py") if f.name not in own]
    assert len(files) > 100
    named = [str(f.relative_to(PACKAGE)) for f in files if NAMED.search(f.read_text())]
    assert named == []


def test_the_pattern_finds_what_it_looks_for():
    for text in ("torch._C._x()", "x._cdata", "from torch.utils._pytree import y", "torch._foo_("):
        assert NAMED.search(text)
    assert not NAMED.search("torch.__version__")


def test_a_storage_has_one_key():
    x = torch.zeros(8)
    assert (
        private.storage_key(x)
        == private.storage_key(x[2:])
        == private.storage_key(x.untyped_storage())
        == private.cdata(x.untyped_storage())
    )
    assert private.storage_key(x) != private.storage_key(x.clone())


def test_a_watched_storage_gives_its_bytes_back_and_keeps_its_key():
    x = torch.zeros(8)
    key, watch = private.storage_key(x), private.StorageWatch(x)
    assert not torch.UntypedStorage._expired(watch._held)
    del x
    assert torch.UntypedStorage._expired(watch._held)
    others = [torch.zeros(8) for _ in range(300)]
    assert key not in {private.storage_key(one) for one in others}


def test_references_to_a_storage_are_counted():
    x = torch.zeros(8)
    before = private.storage_uses(x)
    view = x[1:]
    assert private.storage_uses(x) == before + 1
    del view
    assert private.storage_uses(x) == before


def test_pytrees_come_apart_and_together():
    leaves, spec = private.tree_flatten({"a": [1, 2], "b": 3})
    assert isinstance(spec, private.TreeSpec)
    assert private.tree_leaves({"a": [1, 2], "b": 3}) == leaves == [1, 2, 3]
    assert private.tree_unflatten([4, 5, 6], spec) == {"a": [4, 5], "b": 6}
    assert private.tree_map(lambda n: n + 1, (1, [2])) == (2, [3])
    assert private.tree_map_only(int, lambda n: n + 1, (1, "x")) == (2, "x")


def test_dispatch_modes_see_operators_unless_they_are_disabled():
    seen = []

    class Seen(private.DispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with Seen():
        torch.zeros(2).add(1)
        count = len(seen)
        with private.disable_current_modes():
            torch.zeros(2).add(1)
    assert count == len(seen) == 2


WITHOUT = """
import sys, torch
from outsize.simulate.fake import FakeMode

def some():
    x = torch.zeros(3, 4)
    out = torch.cat([x, x]).add(torch.arange(4)).softmax(-1).mul(2).sum(0)
    return torch.where(out > 0, out, torch.nn.functional.silu(out))

with FakeMode():
    assert some().shape == (4,)
config = torch._dynamo.config
assert config.recompile_limit and "torch._dynamo" not in sys.modules
config.recompile_limit = 3
assert torch.compile(some, backend="eager")().equal(some())
assert torch._dynamo is sys.modules["torch._dynamo"] and torch._dynamo.config is config
assert torch._dynamo.config.recompile_limit == 3
with FakeMode():
    assert some().shape == (4,)
"""


def test_fake_tensors_come_without_the_compiler_which_comes_when_it_is_asked_for():
    subprocess.run([sys.executable, "-c", WITHOUT], check=True)


def test_modes_transforms_and_profilers_see_operators():
    class Seen(private.DispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    assert private.unseen()
    with Seen():
        assert not private.unseen()
    with torch.profiler.profile():
        assert not private.unseen()
    unseen = []
    torch.func.grad(lambda x: (unseen.append(private.unseen()), x.sum())[1])(torch.ones(2))
    assert unseen == [False] and private.unseen()


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, by):
        ctx.by = by
        return x * by

    @staticmethod
    def backward(ctx, gy):
        return gy * ctx.by, None


def test_a_function_is_entered_as_by_apply_and_transforms_are_refused():
    x = torch.randn(3, requires_grad=True)
    y = private.enter(Twice, x, 2.0)
    y.sum().backward()
    assert torch.equal(y, Twice.apply(x, 2.0)) and x.grad.tolist() == [2.0] * 3
    with pytest.raises(RuntimeError, match="setup_context"):
        torch.func.grad(lambda x: private.enter(Twice, x, 2.0).sum())(torch.ones(3))


def test_dispatch_modes_are_called_as_they_are():
    def seen(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))

    mode = type("Seen", (private.DispatchMode,), {"__torch_dispatch__": seen})
    assert mode.__torch_dispatch__ is seen


def test_fake_tensors_have_no_memory():
    private.warm_fake_tensors()
    with private.FakeTensorMode() as mode:
        x = torch.zeros(1 << 40)
        assert isinstance(x, private.FakeTensor) and private.rehearsing()
        with private.unset_fake_temporarily():
            assert not isinstance(torch.zeros(2), private.FakeTensor)
            assert not private.rehearsing()
        with pytest.raises(private.DataDependentOutputException):
            x.sum().item()
        with pytest.raises(private.DynamicOutputShapeException):
            x.nonzero()
    assert mode is not None


def test_flash_attention_is_attention_with_its_log_sum_exp():
    q, k, v = (torch.randn(1, 2, 16, 8, dtype=torch.float64) for _ in range(3))
    out, lse = private.flash_forward(q, k, v, 0.0, True)[:2]
    scores = (q @ k.transpose(-1, -2) / 8**0.5).masked_fill(
        ~torch.ones(16, 16, dtype=torch.bool).tril(), float("-inf")
    )
    assert torch.allclose(out, scores.softmax(-1) @ v, atol=1e-12)
    assert torch.allclose(lse.double(), scores.logsumexp(-1), atol=1e-6)
    grads = private.flash_backward(torch.ones_like(out), q, k, v, out, lse, 0.0, True)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    nn.functional.scaled_dot_product_attention(*leaves, is_causal=True).sum().backward()
    for mine, leaf in zip(grads, leaves, strict=True):
        assert torch.allclose(mine, leaf.grad, atol=1e-10)


def test_products_of_groups_are_products_of_their_rows():
    rows, weights = torch.randn(5, 4), torch.randn(2, 4, 8)
    got = private.grouped_product(rows, weights, torch.tensor([3, 5], dtype=torch.int32))
    want = torch.cat([rows[:3] @ weights[0], rows[3:] @ weights[1]])
    assert torch.allclose(got, want, atol=1e-5)


def test_fused_adamw_is_adamw():
    mine = torch.linspace(-1, 1, 10)
    theirs = nn.Parameter(mine.clone())
    theirs.grad = torch.linspace(1, 2, 10)
    optimizer = torch.optim.AdamW([theirs], lr=0.1, weight_decay=0.1)
    optimizer.step()
    private.fused_adamw_(
        [mine], [theirs.grad], [torch.zeros(10)], [torch.zeros(10)], [], [torch.tensor(1.0)],
        lr=0.1, beta1=0.9, beta2=0.999, weight_decay=0.1, eps=1e-8, amsgrad=False, maximize=False,
    )  # fmt: skip
    assert torch.allclose(mine, theirs, atol=1e-6)


def test_a_scheduler_sees_that_a_step_was_made(recwarn):
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    private.mark_stepped(optimizer)
    scheduler.step()
    assert not recwarn.list


def test_a_module_looks_its_tensors_up_where_they_are_put():
    norm = nn.BatchNorm1d(3)
    private.parameters_here(norm)["weight"] = nn.Parameter(torch.full((3,), 2.0))
    private.buffers_here(norm)["running_mean"] = torch.full((3,), 5.0)
    assert float(norm.weight[0].detach()) == 2.0 and float(norm.running_mean[0]) == 5.0


def test_wrapper_subclasses_have_a_shape_alone():
    class Shape(torch.Tensor):
        __torch_function__ = private.disabled_torch_function

        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            raise NotImplementedError

    made = private.make_wrapper_subclass(Shape, (3, 4), dtype=torch.float32)
    assert isinstance(made, Shape) and made.shape == (3, 4)


def test_a_group_of_one_speaks_over_a_named_interface():
    options = private.gloo_options("127.0.0.1", timedelta(seconds=5))
    group = private.ProcessGroupGloo(HashStore(), 0, 1, options)
    x = torch.ones(2)
    group.allreduce([x]).wait()
    part, whole = torch.zeros(2), torch.zeros(2)
    private.sums_of_parts(group, part, x).wait()
    private.parts_of_all(group, whole, part).wait()
    assert whole.tolist() == [1.0, 1.0]
    private.sums_of_uneven_parts(group, part, [2 * x]).wait()
    assert part.tolist() == [2.0, 2.0]
    assert isinstance(private.Store, type) and issubclass(private.TCPStore, private.Store)
    assert issubclass(private.PrefixStore, private.Store)
    assert private.ReduceOp.SUM is not None and isinstance(private.Work, type)


def test_messages_may_begin_together():
    class Group:
        said = ()

        def _start_coalescing(self):
            self.said += ("start",)

        def _end_coalescing(self):
            self.said += ("end",)
            return "work"

    group = Group()
    private.start_coalescing(group)
    assert private.end_coalescing(group) == "work" and group.said == ("start", "end")


def test_what_is_not_there_is_refused():
    with pytest.raises(AttributeError):
        _ = private.nothing


def test_a_graph_is_differentiated_from_its_edges():
    x = torch.tensor([2.0, 3.0], requires_grad=True)
    squared, cubed = x * x, x * x * x
    edges = [torch.autograd.graph.get_gradient_edge(y) for y in (squared, cubed)]
    del squared, cubed
    private.differentiate(edges, [torch.ones(2), torch.tensor([1.0, 0.0])])
    assert x.grad is not None and x.grad.tolist() == [16.0, 6.0]


def test_a_gradient_is_that_of_autograd_and_leaves_the_inputs_alone():
    x, w = (torch.tensor(n, dtype=torch.float64, requires_grad=True) for n in ([2.0, 3.0], [5.0]))
    y, gy = x * x * w, torch.tensor([1.0, 0.5], dtype=torch.float64)
    expected = torch.autograd.grad(y, (x, w), gy, retain_graph=True)
    for retain in (True, False):
        found = private.gradient(y, gy, (x, w), retain)
        assert all(map(torch.equal, found, expected)) and x.grad is None
    with pytest.raises(RuntimeError, match="second time"):
        private.gradient(y, gy, (x, w))


@pytest.mark.parametrize("extended", [False, True])
def test_a_device_brings_its_own_messages(extended: bool, monkeypatch):
    """What a device's package registers, with PyTorch's two ways to be called."""
    given: list[object] = []

    def short(store, rank, size, timeout):
        given.extend((rank, size, timeout))

    def long(options, backend):
        given.extend((options.group_rank, options.group_size, options.timeout))

    for table in ("_plugins", "default_device_backend_map", "backend_capability"):
        monkeypatch.setattr(Backend, table, dict(getattr(Backend, table)))
    monkeypatch.setattr(Backend, "backend_list", list(Backend.backend_list))
    monkeypatch.setattr(Backend, "backend_type_map", dict(Backend.backend_type_map))
    Backend.default_device_backend_map.pop("hpu", None)  # of a group of another test
    create = long if extended else short
    Backend.register_backend("toy", create, extended_api=extended, devices=["hpu"])
    span = timedelta(seconds=3)
    private.device_transport("hpu", HashStore(), 1, 2, span)
    assert given == [1, 2, span]


def test_a_device_without_messages_is_an_error():
    with pytest.raises(ValueError, match="mps"):
        private.device_transport("mps", HashStore(), 0, 1, timedelta(seconds=3))


def test_a_kernel_is_there_or_not():
    assert private.has_kernel("aten::mm", "CPU") and private.has_kernel("aten::mm", "Meta")
    library = torch.library.Library("outsize_test", "FRAGMENT")
    library.define("nowhere(Tensor x) -> Tensor")
    library.impl("nowhere", lambda x: x, "CPU")
    assert private.has_kernel("outsize_test::nowhere", "CPU")
    assert not private.has_kernel("outsize_test::nowhere", "CUDA")
    assert private.extension() in ("privateuseone", "strict")


def test_a_fake_tensor_is_as_pytorch_makes_it():
    with private.FakeTensorMode() as mode, private.disable_current_modes():
        one, two = (torch.empty(2, 3, dtype=torch.float64, device="meta") for _ in range(2))
        known = private.FakeTensor(mode, one, torch.device("cpu"))
        facts = {name: x for name, x in vars(known).items() if name != "fake_mode"}
        made = private.fake_as(facts, two, mode)
    assert type(made) is private.FakeTensor and vars(made) == vars(known)
    assert made.fake_mode is mode and made.device == known.device == torch.device("cpu")
    assert private.storage_key(made) == private.storage_key(two)
    assert not made.requires_grad and made.shape == (2, 3)
    assert torch._C._dispatch_keys(made) == torch._C._dispatch_keys(known)
    with mode, pytest.raises(RuntimeError, match="data"):
        made.data_ptr()


def test_changes_in_place_are_counted_whatever_else_has_the_memory():
    flat, parameter = torch.zeros(4), nn.Parameter(torch.zeros(4))
    parameter.data = flat.view(4)
    before = private.changes(parameter)
    flat.add_(1)
    assert private.changes(parameter) == before and float(parameter.detach()[0]) == 1
    with torch.no_grad():
        parameter.mul_(2)
    assert private.changes(parameter) > before


def test_hooks_wrappers_and_transforms_are_seen():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    assert private.hooks_of_steps(optimizer) == 0
    optimizer.register_step_pre_hook(lambda *_: None)
    optimizer.register_step_post_hook(lambda *_: None)
    assert private.hooks_of_steps(optimizer) == 2
    assert not private.hooked(model.weight)
    model.weight.register_hook(lambda gradient: None)
    model.bias.register_post_accumulate_grad_hook(lambda parameter: None)
    assert private.hooked(model.weight) and private.hooked(model.bias)
    assert private.within(nn.DataParallel(model)) is model is private.within(model)
    seen = [private.transforming()]
    torch.func.vmap(lambda x: seen.append(private.transforming()) or x)(torch.ones(2))
    with torch.autograd.forward_ad.dual_level():
        seen.append(private.transforming())
    assert seen == [False, True, True]
