"""Chats in each form that people have: the same messages, and what is refused."""

from __future__ import annotations

import json

import pytest

from outsize.data.chats import form_of, turns_of
from outsize.errors import OutsizeError

SAID = [
    {"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"},
    {"role": "user", "content": "Sure?"}, {"role": "assistant", "content": "Yes."},
]  # fmt: skip
SYSTEM = {"role": "system", "content": "Be brief."}
CALL = {"name": "add", "arguments": {"a": 2}}
CALLED = [
    SAID[0],
    {"role": "assistant", "content": None,
     "tool_calls": [{"type": "function", "id": "c1", "function": CALL}]},
    {"role": "tool", "content": "4", "tool_call_id": "c1"}, SAID[1],
]  # fmt: skip
TOOL = {"type": "function", "function": {"name": "add"}}
SPOKEN = [{"from": f, "value": one["content"]}
          for f, one in zip(("human", "gpt") * 2, SAID, strict=True)]  # fmt: skip

FORMS = {
    "messages": ("messages", {"messages": SAID}, SAID),
    "with a system": ("messages", {"messages": SAID, "system": "Be brief."}, [SYSTEM, *SAID]),
    "its own system": (
        "messages", {"messages": [SYSTEM, *SAID], "system": "Be brief."}, [SYSTEM, *SAID]
    ),
    "parts": (
        "messages",
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "2"},
                                                   {"type": "text", "text": "+ 2?"}]}, SAID[1]]},
        [{"role": "user", "content": "2\n+ 2?"}, SAID[1]],
    ),
    "calls as text": (
        "messages",
        {"messages": [SAID[0],
                      {"role": "assistant", "content": None, "tool_calls": [
                          {"type": "function", "id": "c1",
                           "function": {"name": "add", "arguments": '{"a": 2}'}}]},
                      *CALLED[2:]], "tools": json.dumps([TOOL])},
        CALLED,
    ),
    "an old call": (
        "messages",
        {"messages": [SAID[0], {"role": "assistant", "content": None, "function_call":
                                {"name": "add", "arguments": '{"a": 2}'}}, SAID[1]]},
        [SAID[0], {"role": "assistant", "content": None,
                   "tool_calls": [{"type": "function", "function": CALL}]}, SAID[1]],
    ),
    "ShareGPT": ("sharegpt", {"conversations": SPOKEN, "id": 7}, SAID),
    "ShareGPT with OpenAI's names": ("sharegpt", {"conversations": SAID}, SAID),
    "ShareGPT, calls": (
        "sharegpt",
        {"conversations": [SPOKEN[0], {"from": "function_call", "value": json.dumps(CALL)},
                           {"from": "observation", "value": "4"}, SPOKEN[1]],
         "tools": json.dumps([TOOL]), "system": "Be brief."},
        [SYSTEM, SAID[0], {"role": "assistant", "content": None,
                           "tool_calls": [{"type": "function", "function": CALL}]},
         {"role": "tool", "content": "4"}, SAID[1]],
    ),
    "a cell of CSV": ("messages", {"messages": json.dumps(SAID), "id": "7"}, SAID),
    "ShareGPT in a cell": ("sharegpt", {"conversations": f" {json.dumps(SPOKEN)}"}, SAID),
    "Alpaca": ("alpaca", {"instruction": "2 + 2?", "input": "", "output": "4"}, SAID[:2]),
    "Alpaca, all of it": (
        "alpaca",
        {"instruction": "Sure?", "input": "Think.", "output": "Yes.", "system": "Be brief.",
         "history": [["2 + 2?", "4"]]},
        [SYSTEM, *SAID[:2], {"role": "user", "content": "Sure?\n\nThink."}, SAID[3]],
    ),
    "texts": ("completion", {"prompt": "2 + 2?", "completion": "4"}, SAID[:2]),
    "lists": ("completion", {"prompt": SAID[:3], "completion": SAID[3:]}, SAID),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMS)
def test_a_form_is_found_out_and_its_messages_are_those_of_openai(name):
    form, record, wanted = FORMS[name]
    found = turns_of("here", record)
    assert form_of(record) == form and found.messages == wanted
    assert found == turns_of("here", record, form=form)
    assert found.weights == (1.0,) * sum(one["role"] == "assistant" for one in wanted)
    assert (found.tools == [TOOL]) == ("tools" in record)


def test_a_field_of_another_name_and_a_form_that_is_named():
    both = {"messages": SAID[:2], "prompt": "Sure?", "completion": "Yes.", "talk": SAID}
    assert turns_of("here", both).messages == SAID[:2]
    assert turns_of("here", both, "talk").messages == SAID
    assert turns_of("here", both, form="completion").messages == SAID[2:]


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"text": "a", "id": 1}, r"no field 'messages' \(fields: 'text', 'id'\); expected a chat"),
        ({"conversations": [{"from": "narrator", "value": "a"}]}, "has the role 'narrator'"),
        ({"conversations": []}, r"conversations is \[\]; expected a list of messages"),
        ({"instruction": "a", "output": " "}, "message 2 is the assistant's and empty"),
        ({"instruction": "a", "output": "b", "history": [["c"]]}, "expected pairs of texts"),
        ({"conversations": [{"from": "system", "value": "No."}, *SPOKEN], "system": "Be brief."},
         "the field system is 'Be brief.', and the first message is the system's and says 'No.'"),
        ({"prompt": 7, "completion": "b"}, "message 1 has the content 7; expected a string"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "type 'image_url'"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "half a surrogate pair"),
        ({"messages": SAID, "tools": "{}"}, r"tools is \{\}; expected a list of tools"),
        ({"messages": [*SAID, {"role": "assistant", "tool_calls": [{"id": "c"}]}]},
         "expected a function with its name and arguments"),
        ({"messages": [*SAID, {"role": "assistant", "tool_calls": [
            {"function": "[" * 10**5}]}]}, "expected a function with its name and arguments"),
        ({"messages": [*SAID, {"role": "assistant", "tool_calls": "add"}]}, "a list of calls"),
    ],
)  # fmt: skip
def test_what_is_no_chat_is_refused_in_a_line(record, message):
    with pytest.raises(OutsizeError, match=f"^here: .*{message}") as caught:
        turns_of("here", record)
    assert "\n" not in str(caught.value)
