"""Conversations: whose each message is, and why one teaches nothing."""

# pyright: basic, reportPrivateImportUsage=false
import pathlib
import typing

import pytest
from builders import learned, manifest, run
from builders import records as written

from ddptrain.data import chats, lessons, shards
from ddptrain.ground import errors


def spoken(role: str, answer: str = "It is 4.", **more: object) -> dict[str, typing.Any]:
    """Return a conversation of two messages, the second of some role."""
    asked = {"from": "human", "value": "What is 2 plus 2?"}
    return {"conversations": [asked, {"from": role, "value": answer, **more}]}


def prepared(folder: pathlib.Path, records: list[dict[str, typing.Any]]) -> shards.Dataset:
    path = written(folder / "chat.jsonl", records)
    return run(path, output=folder / "d", val_share=0.0, mask_prompts=True)


def test_every_name_that_exporters_give_the_model_is_learned(tmp_path: pathlib.Path):
    names = ["gpt"] * 120 + ["chatgpt"] * 60 + ["assistant"] * 60 + ["bing"] * 60
    dataset = prepared(tmp_path, [spoken(name) for name in names])
    assert learned(dataset) == 300 * len("It is 4.\n")
    assert dataset.not_learned == ()


@pytest.mark.parametrize("name", ["Claude", "bard", "ChatGPT", "model", "bot", "CHATBOT"])
def test_names_of_the_model_are_known_in_any_case(name: str):
    (message,) = chats.read([{"role": name, "content": "x"}], "here", lessons.Lessons())
    assert (message.role, message.learned) == (chats.ASSISTANT, True)


def test_unknown_roles_are_named_with_their_number_before_training(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
):
    dataset = prepared(tmp_path, [spoken("gpt")] * 180 + [spoken("narrator")] * 120)
    assert dataset.not_learned == (
        "120 of 300 conversations teach nothing: role narrator",
        "messages of unknown roles, read but not learned: narrator 120",
    )
    assert all(f"[DATA] {line}" in caplog.text for line in dataset.not_learned)


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        (spoken("user"), "no message of the assistant"),
        (spoken("gpt", ""), "empty answers"),
        (spoken("gpt", weight=0), "answers marked as not to be learned"),
        (spoken("gpt", "", tool_calls=[{"id": 1}]), "answers without text (key tool_calls)"),
        (
            {"conversations": [{"from": "eve", "value": "a"}, {"from": "bob", "value": "b"}]},
            "roles bob, eve",
        ),
    ],
)
def test_a_conversation_that_teaches_nothing_has_its_reason(
    record: dict[str, typing.Any], reason: str, tmp_path: pathlib.Path
):
    dataset = prepared(tmp_path, [spoken("gpt"), record])
    assert dataset.not_learned[0] == f"1 of 2 conversations teach nothing: {reason}"


def test_most_conversations_without_an_answer_are_refused_with_their_roles(tmp_path: pathlib.Path):
    records = [spoken("gpt"), *[spoken("narrator")] * 2, spoken("user")]
    with pytest.raises(
        errors.UserError,
        match="3 of 4 conversations teach nothing: role narrator 2, no message of the assistant 1; "
        "only messages of the role assistant are learned: rename",
    ):
        prepared(tmp_path, records)


def test_keys_and_parts_that_are_not_read_are_listed(tmp_path: pathlib.Path):
    parts = [{"type": "thinking", "thinking": "hmm"}, {"type": "text", "text": "4"}]
    record = {
        "messages": [
            {"role": "user", "content": "2+2"},
            {"role": "assistant", "content": parts, "reasoning_content": "sum", "name": ""},
            {"role": "assistant", "content": None, "function_call": {"name": "add"}},
        ],
        "id": 17,
        "tools": [],
    }
    dataset = prepared(tmp_path, [record])
    assert manifest(dataset)["not_read"] == {
        "key id": [1, 2],
        "part thinking": [1, 3],
        "key reasoning_content": [1, 3],
        "key function_call": [1, 15],
    }


def test_of_many_names_only_some_are_listed(tmp_path: pathlib.Path):
    records = [{"text": "x", f"k{number}": "y"} for number in range(300)]
    left_out = manifest(prepared(tmp_path, records))["not_read"]
    assert left_out["key (others)"] == [200, 200]
    assert sum(count for count, _ in left_out.values()) == 300
