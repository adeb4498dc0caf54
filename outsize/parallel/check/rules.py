"""Layout rules of operators that compute: what they make of layouts on one mesh axis.

What all workers compute from the same is the same: an operator without a rule takes replicated
tensors and gives replicated ones. The rules say what else is allowed. These are the signatures of
OneFlow (Yuan et al., 2021, section 3.2), as functions: of the layouts that go in to those that come
out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from outsize.parallel.check.refusal import Call, Refusal, common
from outsize.parallel.check.shapes import POINTWISE
from outsize.parallel.check.views import VIEWS
from outsize.parallel.layouts import PARTIAL, REPLICATED, Layout, Sharded

SAME = frozenset(
    {"clone", "detach", "alias", "_to_copy", "contiguous", "neg", "mark", "lift_fresh", "to"}
)  # linear in their one tensor, element by element
_ALONG_NAMES = (
    "softmax _softmax _safe_softmax log_softmax _log_softmax cumsum cumprod sort argsort "
    "topk logcumsumexp"
)
ALONG = frozenset(_ALONG_NAMES.split())  # one dim is looked at as a whole, and stays
_OVER_NAMES = (
    "sum mean amax amin max min argmax argmin var std var_mean norm linalg_vector_norm "
    "logsumexp prod any all"
)
OVER = frozenset(_OVER_NAMES.split())  # dims are looked at as a whole, and go
BLANK = frozenset({"empty_like", "zeros_like", "new_empty", "new_zeros", "empty", "zeros"})
UNIFORM = frozenset({"full_like", "ones_like", "new_full", "new_ones"})
_NEEDS = {
    "mean": "all_reduce of the sum, and one division by the whole count",
    "amax": "all_reduce(max)",
    "max": "all_reduce(max)",
    "logsumexp": "all_reduce(max) and all_reduce",
    "norm": "all_reduce of the squares",
    "linalg_vector_norm": "all_reduce of the squares",
    "layer_norm": "all_reduce of the moments",
    "rms_norm": "all_reduce of the squares",
}


def _pointwise(call: Call) -> Layout:
    if PARTIAL in call.layouts:
        return _of_summands(call)
    rank = len(call.out[0])
    cuts = {
        x.at(x.dim + rank - len(shape))
        for x, shape in zip(call.layouts, call.shapes, strict=True)
        if isinstance(x, Sharded)
    }
    if len(cuts) > 1:
        a, b, *_ = sorted(cuts, key=str)
        raise Refusal(f"a tensor that is {a} meets one that is {b} in {call.op}", "all_to_all")
    (cut,) = cuts
    for x, shape in zip(call.layouts, call.shapes, strict=True):
        here = cut.dim - rank + len(shape)
        if isinstance(x, Sharded) and shape[here] != call.out[0][cut.dim]:
            raise Refusal(f"the one row of dim {here} of {shape} is sharded", "all_gather")
        if x == REPLICATED and here >= 0 and shape[here] != 1:
            raise Refusal(
                f"a whole tensor {shape} meets one that is {cut} in {call.op}", "take of its part"
            )
    return cut


def _of_summands(call: Call) -> Layout:
    """Only what is linear in the sum may be done to each summand."""
    op, kinds = call.op, call.layouts
    if any(isinstance(x, Sharded) for x in kinds):
        raise Refusal(f"a partial tensor meets a sharded one in {op}", "all_reduce")
    summands = sum(x == PARTIAL for x in kinds)
    if op in ("add", "sub", "rsub", "copy"):
        # A number, or what all have, would be added on every worker.
        if summands == len(kinds) and (len(kinds) == 2 or op == "copy"):
            return PARTIAL
        raise Refusal(
            f"a replicated term is added to a partial tensor: the sum has it {call.n} times",
            "all_reduce before the addition",
        )
    linear = (
        (op == "mul" and summands == 1)
        or (op == "div" and summands == 1 and kinds[0] == PARTIAL)
        or (op == "where" and kinds[0] == REPLICATED and summands == len(kinds) - 1 == 2)
        or (op == "masked_fill" and kinds[0] == PARTIAL and summands == 1 and call.args[2] == 0)
        or op == "zero"
    )
    if linear:
        return PARTIAL
    if op == "mul":
        raise Refusal("two partial tensors are multiplied", "all_reduce")
    raise Refusal(f"a partial tensor enters {op}, which is not linear", "all_reduce")


def _labelled(call: Call, a: str, b: str, out: str) -> Layout:
    """A product of two tensors, their dims by letters."""
    la, lb = call.layouts
    if PARTIAL in (la, lb):
        other = lb if la == PARTIAL else la
        if other != REPLICATED:
            raise Refusal(f"a partial tensor is multiplied by one that is {other}", "all_reduce")
        return PARTIAL
    at = a[la.dim] if isinstance(la, Sharded) else None
    bt = b[lb.dim] if isinstance(lb, Sharded) else None
    label = at or bt
    assert label is not None
    cut = la if isinstance(la, Sharded) else lb
    assert isinstance(cut, Sharded)
    if label in a and label in b and (at != bt or la.at(0) != lb.at(0)):  # type: ignore[union-attr]
        raise Refusal(
            f"a dim that both factors have is {la} in one and {lb} in the other",
            "take or all_gather",
        )
    if at and bt and at != bt:
        raise Refusal(f"factors are cut along different dims: {la} and {lb}", "all_gather")
    return cut.at(out.index(label)) if label in out else PARTIAL


_BATCH = "abcdefgh"


def _linear(call: Call) -> Layout:
    batch = _BATCH[: len(call.shapes[0]) - 1]
    return _labelled(call, batch + "k", "nk", batch + "n")


def _mm(call: Call) -> Layout:
    return _labelled(call, "mk", "kn", "mn")


def _matmul(call: Call) -> Layout:
    left, right = (len(shape) for shape in call.shapes)
    if left < 2 or right < 2:
        raise Refusal("a vector is multiplied", "all_gather")
    batch = _BATCH[: max(left, right) - 2]
    a = batch[len(batch) - left + 2 :] + "mk"
    b = batch[len(batch) - right + 2 :] + "kn"
    return _labelled(call, a, b, batch + "mn")


def _embedding(call: Call) -> Layout:
    """A weight cut between rows gives summands: zeros for tokens that lie elsewhere."""
    weight, ids = call.layouts[:2]
    if ids == REPLICATED and isinstance(weight, Sharded):
        return PARTIAL if weight.dim == 0 else weight.at(len(call.out[0]) - 1)
    if weight == REPLICATED and isinstance(ids, Sharded):
        return ids
    if weight == PARTIAL and ids == REPLICATED:
        return PARTIAL
    raise Refusal(f"an embedding's weight is {weight} and its ids are {ids}", "all_gather")


def _dims(call: Call) -> list[int]:
    rank = len(call.shapes[0])
    named = call.kwargs.get("dim", call.args[1] if len(call.args) > 1 else None)
    if call.op in ("linalg_vector_norm", "norm"):
        named = call.args[2] if len(call.args) > 2 else call.kwargs.get("dim")
    if call.op == "topk":
        named = call.args[2] if len(call.args) > 2 else -1
    if named is None or named == []:
        return list(range(rank))
    return [d % rank for d in (named if isinstance(named, (list, tuple)) else [named])]


def _local(call: Call, dim: int) -> Refusal:
    need = _NEEDS.get(call.op, "all_gather")
    return Refusal(f"{call.op} over dim {dim}, which is sharded, sees a part of it", need)


def _along(call: Call) -> Layout:
    layout = call.layouts[0]
    if layout == PARTIAL:
        raise Refusal(f"a partial tensor enters {call.op}, which is not linear", "all_reduce")
    if isinstance(layout, Sharded) and layout.dim in _dims(call):
        raise _local(call, layout.dim)
    return layout


def _over(call: Call) -> Layout:
    layout, dims = call.layouts[0], _dims(call)
    if layout == PARTIAL:
        if call.op in ("sum", "mean"):
            return PARTIAL
        raise Refusal(f"a partial tensor enters {call.op}, which is not linear", "all_reduce")
    assert isinstance(layout, Sharded)
    if layout.dim in dims:
        if call.op == "sum":
            return PARTIAL
        raise _local(call, layout.dim)
    kept = len(call.out[0]) == len(call.shapes[0])
    return layout if kept else layout.at(layout.dim - sum(d < layout.dim for d in dims))


def _norm(call: Call) -> Layout:
    layout, *affine = call.layouts
    shape = call.args[1]
    if layout == PARTIAL or PARTIAL in affine:
        raise Refusal(f"a partial tensor enters {call.op}, which is not linear", "all_reduce")
    first = len(call.shapes[0]) - len(shape)
    if isinstance(layout, Sharded) and layout.dim >= first:
        raise _local(call, layout.dim)
    if any(x != REPLICATED for x in affine):
        raise Refusal(f"the weight of {call.op} is sharded and its input is whole", "all_gather")
    return layout


def _attention(call: Call) -> Layout:
    """q, k, v and a mask: heads or rows of the batch may be cut."""
    q, k, v = call.layouts[:3]
    if PARTIAL in call.layouts:
        raise Refusal("a partial tensor enters attention, which is not linear", "all_reduce")
    tail = 2 if call.op == "scaled_dot_product_attention" else 1
    if isinstance(q, Sharded) and call.shapes[1][q.dim] == call.shapes[2][q.dim] == 1:
        k, v = (q if x == REPLICATED else x for x in (k, v))  # one head for all queries
    dims = {x.dim if isinstance(x, Sharded) else None for x in (q, k, v)}
    segments = {x.segments for x in (q, k, v) if isinstance(x, Sharded)}
    if len(dims) > 1 or len(segments) > 1:
        raise Refusal(f"queries are {q}, keys {k}, values {v}", "take or all_gather")
    (dim,) = dims
    tokens = 0 if call.op == "attend" else None
    if dim in (None, tokens) or dim >= len(call.shapes[0]) - tail:
        raise Refusal(f"attention looks at the whole of dim {dim}, which is sharded", "all_gather")
    assert isinstance(q, Sharded)
    for mask, shape in zip(call.layouts[3:], call.shapes[3:], strict=True):
        here = dim - len(call.shapes[0]) + len(shape)
        if mask == REPLICATED and here >= 0 and shape[here] != 1:
            raise Refusal(f"a whole mask {shape} meets queries that are {q}", "take of its part")
        if isinstance(mask, Sharded) and mask != q.at(here):
            raise Refusal(f"a mask that is {mask} meets queries that are {q}", "all_gather")
    return q


def _recurrence(call: Call) -> Layout:
    """Heads alike in all inputs may be cut, behind the tokens."""
    if PARTIAL in call.layouts:
        raise Refusal("a partial tensor enters a recurrence, which is not linear", "all_reduce")
    first = call.layouts[0]
    if any(layout != first for layout in call.layouts):
        raise Refusal(f"inputs of a recurrence are {call.layouts}", "take or all_gather")
    if isinstance(first, Sharded) and first.dim != 1:
        raise Refusal(f"a recurrence looks at the whole of dim {first.dim}", "all_gather")
    return first


def _by_rows(call: Call) -> Layout:
    """Whole documents lie on each worker."""
    if any(layout != Sharded(0) for layout in call.layouts):
        found = ", ".join(map(str, call.layouts))
        raise Refusal(f"{call.op} is of each worker's own rows, and takes {found}", "take")
    return Sharded(0)


def _by_index(call: Call) -> Layout:
    """scatter, gather: numbers of rows along one dim, which all of a worker's tensors have."""
    dim = call.numbers[0] % len(call.shapes[0])
    layout = common(call.layouts, "scattered or gathered")
    if isinstance(layout, Sharded) and layout.dim == dim:
        raise _local(call, dim)
    return layout


def _same(call: Call) -> Layout:
    return call.layouts[0]


def _loss(call: Call) -> Layout:
    logits, targets = call.layouts[:2]
    if logits == PARTIAL:
        raise Refusal("a partial tensor enters cross_entropy, which is not linear", "all_reduce")
    classes = 1 if len(call.shapes[0]) > 1 else 0
    if isinstance(logits, Sharded) and logits.dim == classes:
        raise _local(call, classes)
    cut = logits if isinstance(logits, Sharded) else targets
    if logits != REPLICATED and targets == cut and call.kwargs.get("reduction") == "sum":
        return PARTIAL
    raise Refusal(
        f"cross_entropy of logits that are {logits} and targets that are {targets} divides by the"
        " count of a part",
        _NEEDS["mean"],
    )


def _number(call: Call) -> Layout:
    raise Refusal(f"a number is read from a tensor that is {call.layouts[0]}", "all_reduce")


RULES: Mapping[str, Callable[[Call], Layout | list[Layout]]] = {
    **dict.fromkeys(SAME, _same),
    **dict.fromkeys(POINTWISE, _pointwise),
    **dict.fromkeys(ALONG, _along),
    **dict.fromkeys(OVER, _over),
    **VIEWS,
    "linear": _linear,
    "mm": _mm,
    "matmul": _matmul,
    "bmm": _matmul,
    "embedding": _embedding,
    "scatter": _by_index,
    "gather": _by_index,
    "layer_norm": _norm,
    "rms_norm": _norm,
    "scaled_dot_product_attention": _attention,
    "attend": _attention,
    "recurrence": _recurrence,
    "attend_by_rows": _by_rows,
    "recurrence_by_rows": _by_rows,
    "cross_entropy": _loss,
    "_local_scalar_dense": _number,
    "item": _number,
}
