"""Labels that a model draws for itself, token by token, from its own logits.

Each token has a number in [0, 1) beside its target: its label is the first whose cumulated
probability is above that. Where the vocabulary is cut, workers tell each other what their own
logits sum to, then how many labels are passed.

T tokens, C tokens of a chunk, D hidden, V vocabulary (here), R workers.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from outsize.kernels.entropy import DRAWN, IGNORE, Targets, Vocabulary
from outsize.kernels.loss import Head, logits, soften, wide


@torch.no_grad()
def drawn(
    h_TD: Tensor, weight_VD: Tensor, bias_V: Tensor | None, targets: Targets, head: Head
) -> Targets:
    """The same targets with labels drawn, where there are some; logits of one chunk at a time."""
    ids_T, tokens = targets.ids_T.clone(), len(h_TD)
    for start in range(0, tokens, head.chunk):
        here = slice(start, min(start + head.chunk, tokens))
        shape = (here.stop - start, weight_VD.shape[0])
        logits_CV = h_TD.new_empty(shape, dtype=wide(h_TD.dtype))
        logits(h_TD[here], weight_VD, bias_V, logits_CV)
        soften(logits_CV, head.scale, head.softcap)
        label_C = _chosen(logits_CV, targets.columns[DRAWN][here], head.vocabulary)
        ids_T[here] = torch.where(ids_T[here] == IGNORE, IGNORE, label_C)
    columns = {name: x_T for name, x_T in targets.columns.items() if name != DRAWN}
    return replace(targets, ids_T=ids_T, columns=columns)


def _chosen(logits_CV: Tensor, drawn_C: Tensor, vocabulary: Vocabulary | None) -> Tensor:
    """Of each row the label, (C,), int64. Logits are overwritten."""
    top_C = logits_CV.amax(1)
    sums_CV = logits_CV.sub_(top_C.unsqueeze(1)).exp_().cumsum(1)
    if vocabulary is None:
        wanted_C, last = drawn_C.to(sums_CV.dtype) * sums_CV[:, -1], sums_CV.shape[1] - 1
        return (sums_CV <= wanted_C.unsqueeze(1)).sum(1).clamp_(max=last)
    both_R2C = _all(torch.stack((top_C, sums_CV[:, -1])), vocabulary)
    grown_RC = (both_R2C[:, 0] - both_R2C[:, 0].amax(0)).exp()
    total_RC, rank = both_R2C[:, 1] * grown_RC, vocabulary.others.rank
    before_C, wanted_C = total_RC[:rank].sum(0), drawn_C.to(sums_CV.dtype) * total_RC.sum(0)
    passed_CV = sums_CV * grown_RC[rank].unsqueeze(1) + before_C.unsqueeze(1)
    passed_C = (passed_CV <= wanted_C.unsqueeze(1)).sum(1)
    return _all(passed_C, vocabulary).sum(0).clamp_(max=vocabulary.size - 1)


def _all(mine: Tensor, vocabulary: Vocabulary) -> Tensor:
    """What every worker has, one behind another."""
    workers, count = len(vocabulary.spans), mine.numel()
    out = mine.new_empty((workers, *mine.shape))
    spans = tuple((r * count, (r + 1) * count) for r in range(workers))
    vocabulary.others.all_gather(mine.reshape(-1), spans, out.view(-1))
    return out
