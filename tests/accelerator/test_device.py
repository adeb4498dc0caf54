"""The device computes: operators, views, random numbers and training give the CPU's bits."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import strict
import torch
from torch import Tensor, nn
from torch.nn import functional as F

x = torch.randn(6, 8, generator=torch.Generator().manual_seed(1))

# Each is run with a function that brings a tensor to the device.
Bring = Callable[[Tensor], Tensor]
Given = Tensor | Sequence[Tensor]


def _changed(y: Tensor, change: Callable[[Tensor], object]) -> Tensor:
    change(y)
    return y


def _two(to: Bring) -> list[Tensor]:
    return [to(x).clone(), to(x) + 1]


OPERATORS: dict[str, Callable[[Bring], Given]] = {
    "views": lambda to: to(x).view(8, 6).t()[1:3],
    "unfold": lambda to: to(x).unfold(1, 3, 2),
    "expand": lambda to: to(x)[:1].expand(4, 8).contiguous(),
    "view of another dtype": lambda to: to(x).view(torch.int32),
    "in place in a view": lambda to: _changed(to(x).clone(), lambda y: y[1:3].add_(2)),
    "through a view of a view": lambda to: _changed(
        to(x).clone(), lambda y: y.view(48)[3:9].view(2, 3).zero_()
    ),
    "out grows": lambda to: torch.add(to(x), 1, out=to(x).new_empty(0)),
    "out of a product": lambda to: torch.mm(to(x), to(x).t(), out=to(x).new_empty(6, 6)),
    "resize": lambda to: _changed(
        to(x).clone(), lambda y: y.resize_(8, 8).view(-1)[48:].zero_()
    ),
    "set": lambda to: to(x).new_empty(0).set_(to(x)),
    "factories": lambda to: [
        torch.full((3,), 2.0, device=to(x).device),
        torch.arange(3, 9, 2, device=to(x).device),
        torch.linspace(0, 1, 5, device=to(x).device),
        torch.eye(5, device=to(x).device),
        torch.tril_indices(5, 5, device=to(x).device),
        torch.tensor([1, 2, 3], device=to(x).device),
    ],
    "numbers of the host": lambda to: [to(x) * torch.tensor(2.0), to(x).half() * 2.5, 2 - to(x)],
    "products": lambda to: [to(x) @ to(x).t(), torch.einsum("ab,cb->ac", to(x), to(x))],
    "bfloat16": lambda to: to(x).bfloat16() @ to(x).bfloat16().t(),
    "float64": lambda to: to(x).double().cumsum(1),
    "sums": lambda to: [to(x).sum(0), to(x).std(1), to(x).norm(), to(x).logsumexp(-1)],
    "pairs": lambda to: [*to(x).max(1), *to(x).topk(3), *to(x).sort(0)],
    "joined": lambda to: [torch.cat(_two(to)), torch.stack(_two(to)), *to(x).split(2)],
    "indices": lambda to: to(x)[to(torch.tensor([1, 3]))],
    "indices of the host": lambda to: to(x)[torch.tensor([1, 3])],
    "mask": lambda to: to(x)[to(x) > 0],
    "where": lambda to: [torch.where(to(x) > 0, to(x), 0.0), to(x).masked_fill(to(x) > 0, 1.0)],
    "written at indices": lambda to: _changed(
        to(x).clone(), lambda y: y.__setitem__(to(torch.tensor([1, 3])), 5.0)
    ),
    "added at indices": lambda to: torch.zeros_like(to(x)).index_add_(
        0, to(torch.tensor([0, 1, 2, 3, 0, 1])), to(x)
    ),
    "gather": lambda to: to(x).gather(1, to(torch.tensor([[3]] * 6))),
    "scatter": lambda to: to(x).scatter(1, to(torch.tensor([[3]] * 6)), 2.0),
    "shapes from values": lambda to: [to(x).nonzero(), torch.unique((to(x) * 2).long())],
    "norms": lambda to: [F.rms_norm(to(x), (8,)), F.layer_norm(to(x), (8,))],
    "losses": lambda to: [
        to(x).log_softmax(-1), F.cross_entropy(to(x), to(torch.arange(6))),
    ],
    "embedding": lambda to: F.embedding(to(torch.tensor([0, 2])), to(x)),
    "activations": lambda to: [F.silu(to(x)), F.gelu(to(x)), F.pad(to(x), (1, 1))],
    "lists": lambda to: [
        *torch._foreach_add(_two(to), 1.0),
        *torch._foreach_norm(_two(to)),
        *_changed(torch.stack(_two(to)), lambda y: torch._foreach_mul_(list(y), 2.0)),
    ],
    "complex": lambda to: torch.view_as_real(torch.view_as_complex(to(x).view(6, 4, 2)) * 1j),
    "random": lambda to: [
        torch.rand(5, device=to(x).device),
        torch.randn(17, device=to(x).device),
        torch.randint(9, (5,), device=to(x).device),
        torch.randperm(11, device=to(x).device),
        torch.multinomial(to(x).abs(), 3),
        F.dropout(to(x), 0.3),
        to(x).clone().normal_(),
    ],
}  # fmt: skip


@pytest.mark.parametrize("order", ["eager", "random", "demand"])
def test_operators_give_the_bits_of_the_cpu(order: str) -> None:
    strict.start(order)
    for name, run in OPERATORS.items():
        given = []
        for bring in (lambda t: t.clone(), lambda t: t.to("strict")):
            torch.manual_seed(0)
            result = run(bring)
            given.append([result] if isinstance(result, Tensor) else list(result))
        for wanted, here in zip(*given, strict=True):
            assert here.device == torch.device("strict:0"), name
            assert here.stride() == wanted.stride() and here.dtype == wanted.dtype, name
            assert torch.equal(here.cpu(), wanted), name


def test_attention_is_the_composed_one() -> None:
    strict.start("demand")
    q, k, v = torch.randn(3, 1, 2, 5, 8, dtype=torch.float64)
    wanted = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    here = F.scaled_dot_product_attention(
        *(each.to("strict") for each in (q, k, v)), is_causal=True
    )
    torch.testing.assert_close(here.cpu(), wanted, rtol=1e-12, atol=1e-12)


def test_generators_are_states_of_their_own() -> None:
    strict.start("random", seed=2)
    first = torch.Generator("strict").manual_seed(3)
    wanted = torch.rand(9, generator=torch.Generator().manual_seed(3))
    assert torch.equal(torch.rand(9, device="strict", generator=first).cpu(), wanted)
    torch.manual_seed(5)
    state = torch.strict.get_rng_state()
    a = torch.rand(9, device="strict")
    torch.strict.set_rng_state(state)
    assert torch.equal(torch.rand(9, device="strict").cpu(), a.cpu())
    with pytest.raises(RuntimeError, match="Expected a 'strict' device type for generator"):
        torch.rand(3, device="strict", generator=torch.Generator())


def test_tensors_of_the_host_are_refused() -> None:
    strict.start()
    here = torch.ones(3, device="strict")
    for run in (lambda: here + x[0, :3], lambda: torch.mm(x, here.expand(8, 3)), here.numpy):
        with pytest.raises((RuntimeError, TypeError), match=r"same device|numpy"):
            run()


def test_an_error_of_a_kernel_is_raised_where_the_host_waits() -> None:
    strict.start("demand")
    wrong = F.embedding(torch.tensor([7], device="strict"), x.to("strict"))
    with pytest.raises((IndexError, RuntimeError), match="out of range"):
        wrong.cpu()


def test_devices_are_apart() -> None:
    strict.start("demand", devices=2)
    assert torch.accelerator.device_count() == 2
    a = x.to("strict:0")
    b = a.to("strict:1")
    assert torch.equal((b * 2).cpu(), x * 2)
    with pytest.raises(RuntimeError, match="same device"):
        _ = a + b
    assert torch.accelerator.memory_allocated(1) > 0


def _trained(device: str, **options: bool) -> list[Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, **options)
    for batch in torch.randn(4, 10, 8):
        optimizer.zero_grad()
        target = torch.arange(10, device=device) % 4
        F.cross_entropy(model(batch.to(device)), target).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return [p.detach().cpu() for p in model.parameters()]


@pytest.mark.parametrize("way", ["foreach", "fused"])
def test_training_gives_the_bits_of_the_cpu_in_twenty_orders(way: str) -> None:
    wanted = _trained("cpu", **{way: True})
    for order, last, seed in strict.ORDERS:
        strict.start(order, last, seed)
        for a, b in zip(_trained("strict", **{way: True}), wanted, strict=True):
            assert torch.equal(a, b), (order, last, seed)


def _small_cnn(device: str) -> list[Tensor]:
    """Losses, weights and running statistics of a small CNN."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(6, 6, 3, stride=2, groups=3), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(6, 5),
    ).double().to(device)  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for batch in torch.randn(3, 4, 3, 12, 12, dtype=torch.float64):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(batch.to(device)), torch.arange(4, device=device))
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [x.cpu() for x in (*losses, *model.state_dict().values())]


def test_a_cnn_trains_as_on_the_cpu() -> None:
    wanted = _small_cnn("cpu")
    for order in strict.ORDERS[::5]:
        strict.start(*order)
        for here, there in zip(_small_cnn("strict"), wanted, strict=True):
            torch.testing.assert_close(here, there, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_takes_the_lists_of_pytorch(dtype: torch.dtype) -> None:
    strict.start("random", seed=1)
    model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 4))
    found = []
    for device in ("cpu", "strict"):
        copy = nn.Sequential(*model).to(device)
        with torch.autocast(device, dtype=dtype):
            assert torch.is_autocast_enabled(device)
            hidden = copy[0](x.to(device))
            said = [hidden.dtype, copy[1](hidden).exp().dtype, (hidden @ hidden.t()).dtype]
            said.append(torch.addcmul(hidden, hidden.float(), hidden.float()).dtype)
            out = copy(x.to(device))
        out.float().sum().backward()
        found.append((said, out.detach().cpu(), [p.grad.cpu() for p in copy.parameters()]))
        copy.zero_grad()
    (there, wanted, _), (said, out, gradients) = found
    assert said == [dtype, torch.float32, dtype, torch.float32], there
    torch.testing.assert_close(out, wanted, rtol=0, atol=0.02)
    assert all(g.dtype == torch.float32 and g.isfinite().all() for g in gradients)
