"""A model that is read from its files as it computes, against the same model in memory."""

from __future__ import annotations

import itertools
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from heads import watched
from subjects import CONFIGS
from torch import Tensor

import outsize
from outsize.checkpoint.hub import describe
from outsize.decode.generate import GREEDY, Request, generate
from outsize.errors import OutsizeError
from outsize.memory.ledger import Ledger
from outsize.models.build import build
from outsize.models.decoder import Decoder
from outsize.models.families import parse
from outsize.runtime.session import Session
from outsize.runtime.tokens.pooled import PooledFiles
from outsize.runtime.tokens.source import Source
from outsize.schedule import Kind, State
from outsize.schedule.item import Item
from outsize.schedule.residency import moved
from outsize.serve.files import InFiles, Limits
from outsize.serve.model import Model
from outsize.simulate.tokens import needs

PROMPT, NEW = [5, 17, 2, 44, 9, 30, 8], 4
REQUEST = Request(tuple(PROMPT), NEW, GREEDY)
MORE: dict[str, dict[str, Any]] = {
    **CONFIGS,
    "gpt_neox": {**CONFIGS["llama, untied"], "model_type": "gpt_neox", "hidden_size": 32},
    "phi3": {**CONFIGS["llama, untied"], "model_type": "phi3"},
}
DEEP = {**CONFIGS["llama, untied"], "num_hidden_layers": 8}


def _model(config: dict[str, Any], dtype: torch.dtype = torch.float32) -> Decoder:
    """Lively: every weight its own, also those that start alike."""
    model = build(parse({**config, "initializer_range": 0.3}), seed=1, dtype=dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += torch.randn_like(parameter) * 0.1
    return model


def _directory(tmp_path: Path, model: Decoder, shard: int = 5 << 30) -> Path:
    outsize.save(model, tmp_path / "model", max_shard_bytes=shard)
    return tmp_path / "model"


class Seen:
    """The likeliest token; keeps the logits."""

    def __init__(self) -> None:
        self.logits = list[Tensor]()

    def __call__(self, logits_V: Tensor, index: int) -> int:
        self.logits.append(logits_V.clone())
        return int(logits_V.argmax())


def _streamed(path: Path, memory: int, dtype: Any = None, **options: Any) -> Model:
    found = describe(path)
    return Model(found.model, InFiles(found, Limits(memory, **options), dtype))


def _home(model: Model) -> InFiles:
    assert isinstance(model.home, InFiles)
    return model.home


def _pooled(model: Model) -> PooledFiles:
    found = _home(model).pooled
    assert found is not None
    return found


def _run(model: Model, request: Request | None = None, slices: int = 3) -> list[Any]:
    """The tokens, and the logits that each was drawn from."""
    seen, asked = Seen(), request or REQUEST
    session = Session(model) if model.home is None else model.home.ready(asked)[0]
    new = generate(model, asked.ids, asked.max_new_tokens, seen, (), None, session, slices)
    return [new, *seen.logits]


def _same(one: list[Any], other: list[Any]) -> bool:
    return one[0] == other[0] and all(map(torch.equal, one[1:], other[1:]))


def _least(path: Path, **options: Any) -> int:
    """The smallest budget that serves the request, as the refusal of a smaller one says."""
    with _streamed(path, 1, **options) as model, pytest.raises(OutsizeError) as error:
        _home(model).ready(REQUEST)
    return int(str(error.value).split(": give ")[1].split(" bytes")[0].replace(",", ""))


@pytest.mark.parametrize(
    ("named", "dtype"), zip(MORE, itertools.cycle([torch.float32, torch.bfloat16]), strict=False)
)
def test_tokens_and_logits_are_those_of_the_resident_model(
    tmp_path: Path, named: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From slices of the prompt, of which no other token than the last goes through the head."""
    path = _directory(tmp_path, _model(MORE[named], dtype), shard=20_000)
    resident, heads = outsize.load(path), watched(monkeypatch)
    expected = _run(resident)
    assert len(expected) == 1 + NEW  # of slices of the prompt, then token by token
    with _streamed(path, _least(path)) as model:
        assert _same(_run(model), expected)
        assert _pooled(model).layout.read > 0
    with _streamed(path, 1 << 30) as model:
        assert _same(_run(model), expected)
        assert _pooled(model).layout.read == 0
    assert set(heads) == {1}


def test_every_budget_from_least_to_full_and_the_bytes_read(tmp_path: Path) -> None:
    path = _directory(tmp_path, _model(DEEP))
    resident = outsize.load(path)
    expected = _run(resident)
    least, kept, reads = _least(path), [], []
    block = -(-sum(p.nbytes for p in resident.blocks[0].parameters()) // 4096) * 4096
    for budget in range(least, least + 9 * block, 2 * block):
        with _streamed(path, budget) as model:
            _home(model).ready(REQUEST)
            source, layout = _home(model).source, _pooled(model).layout
            before = source.bytes_read
            assert _same(_run(model), expected)
            steps = NEW + 1  # two slices of the prompt
            fed = [PROMPT[:4], PROMPT[4:], *([t] for t in expected[0][:-1])]
            rows = sum(len(set(ids)) for ids in fed) * resident.prologue.tokens.weight[0].nbytes
            fetched = {
                moved(a) for a in layout.schedules[Kind.DECODE].workers[0] if a.kind is Kind.FETCH
            }
            names = [Item(State.PARAMETERS, s) for s in range(10)]
            weights = [[], *(list(b.parameters()) for b in resident.blocks)]
            weights.append(list(resident.epilogue.parameters()))
            formula = sum(
                p.nbytes
                for name, held in zip(names, weights, strict=True)
                if name in fetched
                for p in held
            )
            assert source.bytes_read - before == steps * formula + rows
            kept.append(layout.kept)
            reads.append(formula)
    assert kept == sorted(kept) and kept[0] <= 1 and kept[-1] == 9
    assert reads == sorted(reads, reverse=True) and reads[-1] == 0


def test_the_end_of_a_step_fetches_for_the_next(tmp_path: Path) -> None:
    path = _directory(tmp_path, _model(DEEP))
    with _streamed(path, _least(path) + 60_000) as model:
        _home(model).ready(REQUEST)
        schedule = _pooled(model).layout.schedules[Kind.DECODE]
    actions, residency = schedule.workers[0], schedule.residency
    assert residency is not None
    used = {a.stage: i for i, a in enumerate(actions) if a.kind is Kind.DECODE}
    fetched = {a.stage: i for i, a in enumerate(actions) if a.kind is Kind.FETCH}
    wrapped = [stage for stage, place in fetched.items() if place > used[stage]]
    assert wrapped, "what the next step needs first"
    assert {Item(State.PARAMETERS, stage) for stage in wrapped} <= residency.start
    for stage in set(fetched) - set(wrapped):
        assert fetched[stage] < used[stage - 1], "while the stage before computes"


@pytest.mark.parametrize("prompt", [3, 40])
def test_what_is_counted_is_what_was_predicted(tmp_path: Path, prompt: int) -> None:
    path = _directory(tmp_path, _model({**DEEP, "vocab_size": 300}))
    request = Request(tuple(7 * i % 300 for i in range(prompt)), 3, GREEDY)
    with _streamed(path, 400_000) as model:
        session, at_once = _home(model).ready(request)
        found = _home(model).outlook.share.needs  # type: ignore[union-attr]
        with Ledger() as ledger:
            ledger.see(_pooled(model).pool)
            generate(model, request.ids, 3, GREEDY, (), None, session, at_once)
        predicted = _pooled(model).pool.nbytes + found.cache + found.work
        assert ledger.peak <= predicted <= 400_000
        assert predicted - ledger.peak <= 4096


def test_the_refusal_names_what_is_missing_and_the_least_that_works(tmp_path: Path) -> None:
    path = _directory(tmp_path, _model(DEEP))
    least = _least(path)
    with _streamed(path, least - 10) as model, pytest.raises(OutsizeError) as error:
        _home(model).ready(REQUEST)
    assert "10 bytes missing" in str(error.value) and f"give {least:,} bytes" in str(error.value)
    with _streamed(path, least) as model:
        _home(model).ready(REQUEST)


def test_long_prompts_are_cut_finer_where_memory_is_short(tmp_path: Path) -> None:
    wide = {**DEEP, "num_hidden_layers": 4, "max_position_embeddings": 2048}
    wide |= {"intermediate_size": 2048}
    path = _directory(tmp_path, _model(wide))
    request = Request(tuple(i % 50 for i in range(600)), 2, GREEDY)
    with _streamed(path, 1 << 30) as model:
        found = needs(_home(model).budget.held, request, 155)
        budget = found.cache + found.work + _home(model).budget.least + _home(model).buffers
    with _streamed(path, budget) as model:
        assert _home(model).ready(request)[1] == 150  # half of half of it: 300 are too many
        assert _same(_run(model, request, 150), _run(outsize.load(path), request, 150))


def test_another_dtype_is_converted_once(tmp_path: Path) -> None:
    path = _directory(tmp_path, _model(MORE["llama"], torch.bfloat16))
    resident = outsize.load(path, dtype=torch.float32)
    with _streamed(path, 1 << 30, torch.float32, disk=tmp_path) as model:
        assert _same(_run(model), _run(resident))
        assert _home(model).source.bytes_spilled == sum(p.nbytes for p in resident.parameters())
    assert sorted(tmp_path.iterdir()) == [path]  # nothing is left behind


def test_a_pruned_model_rests_without_its_zeros(tmp_path: Path) -> None:
    dense = _model({**DEEP, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3})
    with torch.no_grad():
        for parameter in dense.blocks.parameters():
            if parameter.dim() == 2:
                parameter[torch.rand_like(parameter) < 0.6] = 0
    path = _directory(tmp_path, dense)
    resident = outsize.load(path)
    expected = _run(resident)
    with _streamed(path, _least(path), disk=tmp_path) as model:
        assert _same(_run(model), expected)
        whole = _pooled(model).layout.read
    with _streamed(path, _least(path, sparse=True), disk=tmp_path, sparse=True) as model:
        _home(model).ready(REQUEST)
        before = _home(model).source.bytes_read
        assert _same(_run(model), expected)
        assert _home(model).source.bytes_read > before
        assert _pooled(model).layout.read < 0.55 * whole  # 40% of the values and a bit for each


def test_called_as_a_model(tmp_path: Path) -> None:
    path = _directory(tmp_path, _model(DEEP))
    ids = torch.tensor([PROMPT, PROMPT[::-1]])
    with torch.no_grad():
        expected = outsize.load(path)(ids)
    with outsize.load(path, memory=60_000) as model:
        assert torch.equal(model(ids), expected) and torch.equal(model(ids[1]), expected[1])
        with pytest.raises(OutsizeError, match="token ids from 5 to 53; expected 0 to 52"):
            model(torch.tensor([5, 53]))
        assert torch.equal(model(ids), expected)  # what failed has spoilt nothing
    with outsize.load(path, memory=20_000) as model, pytest.raises(OutsizeError, match="missing"):
        model(ids)


def test_a_budget_serves_requests_of_other_lengths(tmp_path: Path) -> None:
    path = _directory(tmp_path, _model(DEEP))
    resident = outsize.load(path)
    with outsize.load(path, memory=130_000) as model:
        pools = set()
        for prompt, new in ((3, 4), (3, 4), (40, 5), (3, 4)):
            ids = [i % 50 for i in range(prompt)]
            assert outsize.generate(model, ids, new) == outsize.generate(resident, ids, new)
            pools.add(_pooled(model).layout.pool)
        assert len(pools) > 1


def test_a_file_cut_while_generating(tmp_path: Path) -> None:
    path = _directory(tmp_path, _model(DEEP))
    file = path / "model.safetensors"
    with _streamed(path, _least(path)) as model:
        session, _ = _home(model).ready(REQUEST)
        os.truncate(file, 30_000)
        with pytest.raises(OutsizeError) as error:
            generate(model, PROMPT, NEW, step=session)
    assert str(error.value).startswith(f"{file} is truncated: it ends at byte 30,000, expected ")
    with pytest.raises(OutsizeError) as error:
        _streamed(path, 1 << 30)
    assert str(error.value).startswith(f"{file} is truncated in tensor 'model.layers.0.")


def test_weights_are_read_by_actions_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the first request, of another one, and of one after a step that failed."""
    path = _directory(tmp_path, _model(DEEP))
    read, threads, begun, faulty = Source.read, set[str](), list[int](), list[int]()

    def seen(self: Source, stage: int, room: Tensor) -> None:
        threads.add(threading.current_thread().name)
        begun.append(stage)
        if len(begun) in faulty:
            raise OutsizeError("a fault")
        read(self, stage, room)

    monkeypatch.setattr(Source, "read", seen)
    with _streamed(path, _least(path) + 60_000) as model:
        expected = _run(model)
        filled = {a.stage for a in _pooled(model).layout.schedules[Kind.FETCH].workers[0]}
        assert set(begun[: len(filled)]) == filled
        faulty.append(len(begun) + 3)
        with pytest.raises(OutsizeError, match="a fault"):
            _run(model)
        again = len(begun)
        assert _same(_run(model), expected)
        assert set(begun[again : again + len(filled)]) == filled
    assert threads == {"lane fetch"}


def test_a_tied_head_in_the_files_must_be_the_embedding(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    path = _directory(tmp_path, _model(CONFIGS["llama"]))
    file = path / "model.safetensors"
    (path / "outsize.json").unlink()
    tensors = load_file(file)
    save_file({**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, file)
    _streamed(path, 1 << 30).close()
    save_file({**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"] + 1}, file)
    with pytest.raises(OutsizeError, match="is not the token embedding"):
        _streamed(path, 1 << 30)


def test_what_cannot_go_with_memory_is_refused(tmp_path: Path) -> None:
    path = _directory(tmp_path, _model(CONFIGS["llama"]))
    with pytest.raises(OutsizeError, match="weights = 'random' with memory"):
        outsize.load(path, weights="random", memory="1GiB")
    with pytest.raises(OutsizeError, match="disk and sparse go with memory"):
        outsize.load(path, disk=tmp_path)
