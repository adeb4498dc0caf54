"""Fine-tuning on chats: tokens and targets against transformers, losses and gradients against each
chat alone through plain logits, rows against what must hold for any packing."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace

import chats
import numpy as np
import pytest
import torch
from chats import CHATS, MARKED, PLAIN, TEMPLATES, foreign, jsonl, messages, template
from streamed import plan_of
from threads import play
from tokenizers import Tokenizer as Inner
from torch.nn import functional as F

from outsize.collectives import Mesh
from outsize.data import (
    SOURCES,
    Batch,
    DataConfig,
    TrainStream,
    ValidationStream,
    open_data,
    sandbox,
)
from outsize.errors import OutsizeError
from outsize.models.build import build
from outsize.models.families import parse
from outsize.optim import SGD
from outsize.parallel.divide import divide
from outsize.plan import Pipelined
from outsize.plan.plan import per_segment
from outsize.runtime import Job, NativeFlow
from outsize.runtime.recipe import Here, Recipe
from outsize.techniques.data.chat import KEY, Chat

SEQUENCE = 160


def opened(tmp_path, records, directory, sequence=SEQUENCE, validation=0.0, **settings):
    path = records if isinstance(records, str) else str(jsonl(tmp_path / "chats.jsonl", records))
    config = DataConfig(
        path=path, tokenizer=str(directory), validation=validation, cache=str(tmp_path / "cache"),
        source=(SOURCES.get(KEY), Chat(**settings)), sequence=sequence,
    )  # fmt: skip
    return open_data(config)


def documents(data):
    """Ids and weights of each document."""
    edges = [0, *data.ends.tolist()]
    for start, stop in itertools.pairwise(edges):
        yield data.tokens_N[start:stop].tolist(), data.weights_N[start:stop].tolist()


CALLING = (
    "{% for m in messages %}{{ m.role }}{{ m.content }}"
    "{{ (m.tool_calls or [])|tojson }}{% endfor %}"
)


# -- tokens and targets ----------------------------------------------------------------------------


@pytest.mark.parametrize("as_file", [False, True])
@pytest.mark.parametrize("marks", [MARKED, PLAIN])
@pytest.mark.parametrize("name", TEMPLATES)
def test_tokens_and_targets_are_those_of_transformers(tmp_path, name, marks, as_file):
    """Without marks: the targets that the marked template gives."""
    directory = chats.tokenizer(tmp_path / "tokenizer", template(name, marks), as_file)
    data = opened(tmp_path, [{"messages": messages(chat)} for chat in CHATS], directory).train
    found = list(documents(data))
    assert len(found) == len(CHATS)
    for (ids, weights), chat in zip(found, CHATS, strict=True):
        theirs, mask = foreign(directory, chat, template(name))
        assert ids == theirs
        assert weights == mask and 0 < sum(mask) < len(mask)


def test_weights_of_messages(tmp_path):
    directory = chats.tokenizer(tmp_path / "tokenizer", template("chatml"))
    chat = messages(CHATS[2])
    chat[1]["weight"], chat[3]["weight"] = 0, 0.25
    ((ids, weights),) = documents(opened(tmp_path, [{"messages": chat}], directory).train)
    _, mask = foreign(directory, CHATS[2])
    edge = ids.index(directory_id(directory, "<|im_end|>"), mask.index(1))  # of the first answer
    assert weights == [0.25 * one * (at > edge) for at, one in enumerate(mask)]
    assert 0.25 in weights


def directory_id(directory, token):
    found = json.loads((directory / "tokenizer.json").read_text())
    return next(one["id"] for one in found["added_tokens"] if one["content"] == token)


def test_chatml_for_a_tokenizer_without_a_template(tmp_path):
    directory = chats.tokenizer(tmp_path / "tokenizer", None)
    records = [{"messages": messages(chat)} for chat in CHATS]
    with pytest.raises(OutsizeError, match=r"has no chat template .* set data\.chat\.template to"):
        opened(tmp_path, records, directory)
    data = opened(tmp_path, records, directory, template="chatml").train
    for (ids, weights), chat in zip(documents(data), CHATS, strict=True):
        assert (ids, weights) == foreign(directory, chat, template("chatml"))


def test_parquet(tmp_path):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    directory = chats.tokenizer(tmp_path / "tokenizer", template("chatml"))
    rows = [{"talk": messages(chat)} for chat in CHATS]
    rows[0]["talk"][1]["weight"] = 0.5  # the others have null
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "chats.parquet")
    data = opened(tmp_path, str(tmp_path / "chats.parquet"), directory, field="talk").train
    for at, ((ids, weights), chat) in enumerate(zip(documents(data), CHATS, strict=True)):
        theirs, mask = foreign(directory, chat)
        assert ids == theirs
        assert weights == [one * (1.0 if at else 0.5) for one in mask]


def test_calls_in_parquet_have_the_arguments_that_they_have_in_json(tmp_path):
    """A column's objects have the fields of all of them there, null where one has none."""
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    directory = chats.tokenizer(tmp_path / "tokenizer", CALLING)
    rows = []
    for arguments in ({"at": "a", "in": {"deep": [{"x": 1}]}}, {"in": {"other": True}, "on": 2}):
        call = {"type": "function", "function": {"name": "look", "arguments": arguments}}
        said = {"role": "assistant", "content": "so", "tool_calls": [call]}
        rows.append({"messages": [{"role": "user", "content": "q"}, said]})
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "chats.parquet")
    found = opened(tmp_path, str(tmp_path / "chats.parquet"), directory, 999).train
    wanted = opened(tmp_path, rows, directory, 999).train
    assert list(documents(found)) == list(documents(wanted))


def test_a_token_that_the_prompt_has_too_is_no_target(tmp_path):
    """Special tokens that take the white space behind them, as Phi-3's, reach into the answer."""
    text = (
        "{% for m in messages %}<|head|>{{ m.content }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}<|head|>{% endif %}"
    )
    directory = chats.tokenizer(tmp_path / "tokenizer", text)
    said = json.loads((directory / "tokenizer.json").read_text())
    said["added_tokens"] = [one | {"rstrip": True} for one in said["added_tokens"]]
    (directory / "tokenizer.json").write_text(json.dumps(said))
    chat = [("user", "the mat"), ("assistant", "\n\n  sat"), ("user", "x"), ("assistant", "on")]
    data = opened(tmp_path, [{"messages": messages(chat)}], directory).train
    ((ids, weights),) = documents(data)
    inner = Inner.from_file(str(directory / "tokenizer.json"))
    head, end = (inner.token_to_id(one) for one in ("<|head|>", "<|im_end|>"))
    assert ids.count(head) == 4 and ids.count(end) == 4
    answers = [at for at, one in enumerate(ids) if one == head][1::2]
    wanted = [0.0] * len(ids)
    for at in answers:
        stop = ids.index(end, at)
        wanted[at + 1 : stop + 1] = [1.0] * (stop - at)
    assert weights == wanted


# -- what is refused -------------------------------------------------------------------------------

GOOD = {"messages": messages(CHATS[0])}


def said(*turns, **last):
    made = messages(turns)
    made[-1] |= last
    return {"messages": made}


BAD = {
    "no messages": ({"text": "a"}, r"no field 'messages' \(fields: 'text'\); expected a chat"),
    "a list": ([1], "expected a JSON object, found list"),
    "nothing in it": ({"messages": []}, r"messages is \[\]; expected a list of messages"),
    "a role": (said(("narrator", "a")), "message 1 has the role 'narrator'"),
    "no role": ({"messages": [{"content": "a"}]}, "message 1 has the role None"),
    "a content": (said(("user", 7)), "message 1 has the content 7; expected a string"),
    "empty": (said(("user", "a"), ("assistant", " \n")), "message 2 is the assistant's and empty"),
    "no assistant": (said(("user", "a")), "no assistant message; expected one to train on"),
    "no weight": (
        said(("user", "a"), ("assistant", "b"), weight=0), "all messages of the assistant have weig"
    ),
    "negative": (
        said(("user", "a"), ("assistant", "b"), weight=-1),
        "message 2 has the weight -1; expected a finite number, 0 or more",
    ),
    "nan": (said(("user", "a"), ("assistant", "b"), weight=float("nan")), "has the weight nan"),
    "true": (said(("user", "a"), ("assistant", "b"), weight=True), "has the weight True"),
    "a user's": (
        said(("assistant", "b"), ("user", "a"), weight=1), "is the user's and has a weight"
    ),
}  # fmt: skip


def test_half_a_surrogate_pair_in_a_call_is_named(tmp_path):
    directory = chats.tokenizer(tmp_path / "tokenizer", CALLING)
    call = {"function": {"name": "look", "arguments": {"at": "\ud800"}}}
    record = said(("user", "a"), ("assistant", "b"), tool_calls=[call])
    with pytest.raises(OutsizeError, match=r"chats\.jsonl:1 holds half a surrogate pair"):
        opened(tmp_path, [record], directory)


@pytest.mark.parametrize("name", BAD)
def test_a_bad_line_is_named(tmp_path, name):
    record, message = BAD[name]
    directory = chats.tokenizer(tmp_path / "tokenizer", template("chatml"))
    with pytest.raises(OutsizeError, match=rf"chats\.jsonl:2: .*{message}") as caught:
        opened(tmp_path, [GOOD, record], directory)
    assert "\n" not in str(caught.value)
    assert not any((tmp_path / "cache").glob("*")), "nothing is left behind"


def test_a_line_that_is_not_json(tmp_path):
    directory = chats.tokenizer(tmp_path / "tokenizer", template("chatml"))
    path = tmp_path / "broken.jsonl"
    path.write_bytes(json.dumps(GOOD).encode() + b"\n\n{\xff\n")
    with pytest.raises(OutsizeError, match=r"broken\.jsonl:3: not UTF-8; expected chats"):
        opened(tmp_path, str(path), directory)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{% for m in messages %}[{{ m.role }}]{{ m.content }}{% if loop.last %}!{% endif %}"
         "{% endfor %}", "writes the messages before number 4 in another way"),
        ("{{ messages|length }}{% for m in messages %}{{ m.content|upper }}{% endfor %}",
         "writes the messages before number 4 in another way"),
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
         "it does not end, or makes more text"),
        ("{{ 'a' * 10000000000 }}", "it does not end, or makes more text"),
        ("{{ 'a'.ljust(10000000000) }}", "it asks for 10000000000 of something"),
        ("{{ cycler.__init__.__globals__ }}", "fails: access to attribute '__init__'"),
        ("{{ raise_exception('never') }}", "fails: never"),
        ("{{ messages[7]['content'].split(None) }}", "fails: "),
        ("{{ messages.__class__ }}{{ messages.append(1) }}", "fails: "),
        ("{% for m in messages %}", "cannot be read"),
        ("a{% generation %}{% endgeneration %}", "no token of the chat is a target"),
        ("{% if false %}{% generation %}{% endgeneration %}{% endif %}", "marks no answer"),
    ],
)  # fmt: skip
def test_a_template_that_does_not_serve(tmp_path, monkeypatch, text, message):
    monkeypatch.setattr(sandbox, "ALLOWANCE", 10**6)
    directory = chats.tokenizer(tmp_path / "tokenizer", text)
    with pytest.raises(OutsizeError, match=message):
        opened(tmp_path, [{"messages": messages(CHATS[2])}], directory)


def test_answers_that_are_marked_in_parts_have_their_one_weight(tmp_path):
    part = "{% generation %}{{ m.content }}{% endgeneration %}{% generation %}!{% endgeneration %}"
    told = "{% if m.role == 'assistant' %}" + part + "{% else %}{{ m.content }}{% endif %}"
    text = "{% for m in messages %}" + told + "{% endfor %}"
    chat = [{**one, "weight": 0.25} if one["role"] == "assistant" else one
            for one in messages(CHATS[2])]  # fmt: skip
    directory = chats.tokenizer(tmp_path / "tokenizer", text)
    ((_, weights),) = documents(opened(tmp_path, [{"messages": chat}], directory).train)
    assert set(weights) == {0.0, 0.25}


def test_a_chat_that_begins_with_an_answer(tmp_path):
    """By a template that reads the first message: it has none to render before that answer."""
    text = "{{ messages[0].role }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    directory = chats.tokenizer(tmp_path / "tokenizer", text)
    chat = {"messages": [{"role": "assistant", "content": "hi"}, {"role": "user", "content": "a"}]}
    with pytest.raises(OutsizeError, match=r"chats\.jsonl:1: message 1 is the assistant's.*leave"):
        opened(tmp_path, [chat], directory)


def test_text_files_are_no_chats(tmp_path):
    directory = chats.tokenizer(tmp_path / "tokenizer", template("chatml"))
    (tmp_path / "a.txt").write_text("hello")
    with pytest.raises(OutsizeError, match=r"a\.txt is text; data\.chat reads chats from \.jsonl"):
        opened(tmp_path, str(tmp_path / "a.txt"), directory)


def test_long_chats(tmp_path):
    """Two of three are longer than the row, one of them has its answer behind the end of it."""
    directory = chats.tokenizer(tmp_path / "tokenizer", template("chatml"))
    late = [("user", "the mat " * 40), ("assistant", "late")]
    records = [{"messages": messages(chat)} for chat in (CHATS[0], CHATS[1], late)]
    whole = [ids for ids, _ in documents(opened(tmp_path, records, directory, 400).train)]
    row = len(whole[1]) - 4
    assert len(whole[0]) <= row
    with pytest.raises(OutsizeError, match=rf"jsonl:2: the chat has {row + 4} tokens, more than a"):
        opened(tmp_path, records, directory, row, long="refuse")
    left = opened(tmp_path, records, directory, row, long="leave")
    assert [ids for ids, _ in documents(left.train)] == whole[:1]
    assert left.skipped.summary() == "skipped 2 longer than a row"
    cut = opened(tmp_path, records, directory, row)
    assert [ids for ids, _ in documents(cut.train)] == [whole[0], whole[1][: row + 1]]
    assert cut.skipped.summary() == (
        "skipped 1 longer than a row; 1 cut to the length of a row (2 targets lost)"
    )


def test_a_run_without_a_target_is_refused(tmp_path):
    directory = chats.tokenizer(tmp_path / "tokenizer", template("chatml"))
    late = {"messages": messages([("user", "the mat " * 40), ("assistant", "late")])}
    with pytest.raises(OutsizeError, match=r"no target is in the first .*skipped 2 longer than"):
        opened(tmp_path, [late, late], directory, 20)


def test_bytes_end_a_turn_with_their_own_end(tmp_path):
    """What a named template writes for the end of a tokenizer that has no text for it."""
    record = {"prompt": "é?", "completion": "a\n"}
    ((ids, weights),) = documents(opened(tmp_path, [record], "bytes", template="plain").train)
    assert ids == [*"é?a\n".encode(), 256] and weights == [0, 0, 0, 1, 1, 1]
    data = opened(tmp_path, [record] * 2, "bytes", template="zephyr")
    assert list(data.skipped.warnings()) == []
    for ids, weights in documents(data.train):
        said = [one for one, weight in zip(ids, weights, strict=True) if weight]
        assert said == [*b"a\n", 256]


def test_the_first_token_of_all_is_no_target(tmp_path):
    """Nothing is there to say it from."""
    chat = [("assistant", "ab"), ("user", "c"), ("assistant", "d")]
    record = {"messages": messages(chat)}
    ((ids, weights),) = documents(opened(tmp_path, [record], "bytes", template="plain").train)
    assert ids == [97, 98, 256, 99, 100, 256] and weights == [0, 1, 1, 0, 1, 1]


def test_what_a_user_should_know_is_said(tmp_path):
    """An end that is never a target, in all answers or in some; turns in samples of their own."""
    data = opened(tmp_path, [GOOD], "bytes", template="chatml")
    ((ids, weights),) = documents(data.train)
    said_too = bytes(one for one, weight in zip(ids, weights, strict=True) if weight)
    assert said_too == b"sat on the mat<|im_end|>", "and not the line's end"
    (line,) = data.skipped.warnings()
    assert line.startswith("data: no answer ends in a token that ends a turn")
    some = (
        "{% for m in messages %}{{ m.content }}{% if m.content != 'b' %}{{ eos_token }}{% endif %}"
    )
    directory = chats.tokenizer(tmp_path / "some", some + "{% endfor %}")
    records = [GOOD, said(("user", "a"), ("assistant", "b"))]
    (line,) = opened(tmp_path, records, directory).skipped.warnings()
    assert line.startswith("data: 1 of 2 answers lack a token that ends a turn")
    last = ("{% for m in messages %}{{ m.role }}{% if loop.last and m.role == 'assistant' %}!"
            "{% endif %}{{ m.content + eos_token }}{% endfor %}"
            "{% if add_generation_prompt %}assistant{% endif %}")  # fmt: skip
    directory = chats.tokenizer(tmp_path / "last", last)
    data = opened(tmp_path, [{"messages": messages(CHATS[2])}], directory)
    assert list(data.skipped.warnings()) == [
        "data: answers that are samples of their own: 1, since the chat template writes them"
        " otherwise once others follow"
    ]
    assert data.train.documents == 2
    deaf = "{% for m in messages %}{% if m.role == 'user' %}{{ m.content|upper }}{% elif m.role =="
    deaf += " 'assistant' %}{{ m.content + eos_token }}{% endif %}{% endfor %}"
    directory = chats.tokenizer(tmp_path / "deaf", deaf)
    told = [("developer", "be brief"), *CHATS[0]]
    records = [GOOD, said(*told), said(("system", " "), *told)]
    data = opened(tmp_path, records, directory)
    (line,) = data.skipped.warnings()
    assert line.startswith("data: the chat template leaves out 2 texts of messages, which no token")
    assert "chats.jsonl:2: message 1, the developer's content)" in line
    assert data.skipped.plus(data.skipped).unread_at == data.skipped.unread_at
    assert list(opened(tmp_path, records, directory).skipped.warnings()) == [line], "cached"


# -- rows ------------------------------------------------------------------------------------------


def many(count=40):
    generator = np.random.default_rng(3)
    made = []
    for number in range(count):
        turns = [
            ("user", f"the cat {number}"),
            ("assistant", "sat " * int(generator.integers(1, 26))),
        ]
        made.append({"messages": messages(turns * int(generator.integers(1, 3)))})
        made[-1]["messages"][-1]["weight"] = round(float(generator.random()) + 0.1, 2)
    return made


def test_every_chat_is_once_in_an_epoch_and_whole(tmp_path):
    directory = chats.tokenizer(tmp_path / "tokenizer", template("chatml"))
    data = opened(tmp_path, many(), directory).train
    wanted = sorted(documents(data))
    stream = TrainStream(data, 1, 1, SEQUENCE)
    orders = []
    for epoch in range(2):
        found, order = [], []
        for index in range(stream.rows_per_epoch):
            row = stream.row(epoch * stream.rows_per_epoch + index)
            order.append(row.ids_S.tobytes())
            for start, stop in itertools.pairwise(row.bounds):
                said = row.targets_S[start:stop] != -100
                if not said.any():
                    assert stop == SEQUENCE, "what is left of a row"
                    continue
                weights = row.weights_S[start:stop]
                assert (weights[~said] == 0).all() and (weights[said] > 0).all()
                assert (row.targets_S[start : stop - 1] == row.ids_S[start + 1 : stop])[
                    said[:-1]
                ].all()
                ids = [*row.ids_S[start:stop].tolist(), int(row.targets_S[stop - 1])]
                found.append((ids, [0.0, *weights.tolist()]))
        # ChatML ends in a newline that is no target: the last id of a document.
        newline = wanted[0][0][-1]
        assert sorted(([*ids[:-1], newline], w) for ids, w in found) == wanted
        orders.append(order)
    assert sorted(orders[0]) == sorted(orders[1]) and orders[0] != orders[1]
    filled = sum(len(ids) - 1 for ids, _ in wanted)
    assert filled / (stream.rows_per_epoch * SEQUENCE) > 0.9


def test_validation_is_by_weights(tmp_path):
    directory = chats.tokenizer(tmp_path / "tokenizer", template("chatml"))
    data = opened(tmp_path, many(), directory, validation=0.3)
    held = ValidationStream(data.validation, 2, SEQUENCE)
    batches = list(held)
    assert held.tokens == sum(batch.count() for batch in batches) == data.validation.targets
    widths, weights = data.validation.widths_N, data.validation.weights_N
    assert held.bytes == pytest.approx(float((widths * weights).sum()), rel=1e-6)
    assert sum(batch.weight() for batch in batches) == pytest.approx(float(weights.sum()), rel=1e-6)


# -- losses ----------------------------------------------------------------------------------------


def model(vocab):
    config = parse({
        "model_type": "llama", "hidden_size": 16, "intermediate_size": 24, "vocab_size": vocab,
        "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2,
        "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "hidden_act": "silu",
        "tie_word_embeddings": False,
    })  # fmt: skip
    return build(config, seed=1, dtype=torch.float64)


def alone(twin, data):
    """Mean loss of all chats, each by itself, labels of -100 where the assistant does not speak."""
    total, weight = 0.0, 0.0
    for ids, weights in documents(data):
        one = torch.tensor([ids])
        batch = Batch(one, torch.full_like(one, -100), ((0, len(ids)),))
        context = twin.context(batch.positions().reshape(-1), batch.flat_bounds())
        logits = twin.epilogue.logits(twin.hidden(one.reshape(-1), context))
        labels = torch.where(torch.tensor(weights) > 0, one[0], -100)
        losses = F.cross_entropy(logits[:-1], labels[1:], ignore_index=-100, reduction="none")
        total = total + (losses * torch.tensor(weights[1:])).sum()
        weight += sum(weights)
    return total / weight


MESHES = {
    "alone": (Mesh(), {}),
    "data": (Mesh(data=2), {}),
    "tensor": (Mesh(tensor=2), {}),
    "pipeline": (Mesh(pipeline=2), {"pipeline": Pipelined("1f1b")}),
    "vocabulary": (Mesh(pipeline=2), {"pipeline": Pipelined("1f1b", vocabulary=2)}),
}


@pytest.mark.parametrize("name", MESHES)
def test_a_step_is_that_of_every_chat_by_itself(tmp_path, name):
    """Loss and weights after a step, a whole epoch in it, against chats one by one."""
    directory = chats.tokenizer(tmp_path / "tokenizer", template("chatml"))
    opening = opened(tmp_path, many(20), directory)
    data, vocab = opening.train, opening.tokenizer.vocab_size
    rows = TrainStream(data, 1, 1, SEQUENCE).rows_per_epoch
    rows += rows % 2  # both halves of a data axis alike; an odd one has a row of the next epoch
    mesh, changes = MESHES[name]
    plan = plan_of(
        "float64", segments=4, rows=rows, microbatch_rows=2, sequence=SEQUENCE, mesh=mesh,
        stages=per_segment(4), **changes,
    )  # fmt: skip
    batch = TrainStream(data, 1, rows, SEQUENCE).batch(0)
    extra = rows - TrainStream(data, 1, 1, SEQUENCE).rows_per_epoch
    if extra:
        targets = batch.targets_BS.clone()
        targets[-1] = -100
        batch = replace(batch, targets_BS=targets)

    twin = model(vocab)
    loss = alone(twin, data)
    loss.backward()
    with torch.no_grad():
        wanted = {n: p - 0.5 * p.grad for n, p in twin.named_parameters()}

    def run(world):
        mine = model(vocab)
        cuts = divide(mine, world, plan)
        optimizer = SGD(0.5, weight_decay=0.0)
        job = Job(NativeFlow(mine, plan), plan, Recipe(optimizer), Here(world), cuts=cuts)
        made = float(job.step(batch.rows(*plan.rows_at(job.place))))
        return made, {n: value.clone() for n, value in job.weights()}

    for made, weights in play(mesh, run):
        assert made == pytest.approx(float(loss.detach()), rel=1e-10)
        for key, value in weights.items():
            torch.testing.assert_close(value, wanted[key], rtol=1e-10, atol=1e-10)
