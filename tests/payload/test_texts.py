"""Records in all their shapes: the learned, the left-out and the refused parts."""

# pyright: basic, reportPrivateImportUsage=false
import collections
import dataclasses
import json
import pathlib
import tempfile
import typing

import hypothesis
import hypothesis.strategies as st
import pytest
from builders import decoded, learned, manifest, read, run
from builders import records as written

from ddptrain.data import shards
from ddptrain.ground import errors

WORDS = st.text(st.characters(codec="utf-8"), max_size=8)
ANSWERS = ["assistant", "gpt", "chatgpt", "bing", "bard", "Claude", "model", "bot", "function_call"]
HEADERS = {
    **dict.fromkeys(ANSWERS, "assistant"),
    **{"user": "user", "human": "user", "system": "system", "observation": "tool"},
    "narrator": "narrator",
}
MARKS = [{}, {}, {"weight": 0}, {"weight": 1}, {"train": False}, {"train": True}]
TURNS = st.lists(
    st.tuples(
        st.sampled_from(sorted(HEADERS)),
        WORDS,
        st.sampled_from(MARKS),
        st.sampled_from([None, None, "tool_calls", "reasoning_content", "name"]),
    ),
    max_size=4,
)


@dataclasses.dataclass
class Made:
    """A record, and what should become of it."""

    record: dict[str, typing.Any]
    text: str = ""
    learned: str = ""
    left_out: list[tuple[str, int]] = dataclasses.field(default_factory=list)
    roles: list[str] | None = None  # of a conversation

    @property
    def is_unanswered(self) -> bool:
        return bool(self.roles) and "assistant" not in self.roles and not self.learned


def size(value: object) -> int:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return len(text.encode())


def chat(key: str, turns: list[tuple[str, str, dict[str, typing.Any], str | None]]) -> Made:
    role_key, content_key = ("role", "content") if key == "messages" else ("from", "value")
    made = Made({key: []}, roles=[HEADERS[role] for role, *_ in turns])
    for role, content, mark, more in turns:
        message: dict[str, typing.Any] = {role_key: role, content_key: content, **mark}
        if more == "tool_calls":
            message[more] = [{"function": {"name": content, "arguments": "{}"}}]
        elif more:
            message[more] = content
        if more and message[more]:
            made.left_out.append((f"key {more}", size(message[more])))
        made.record[key].append(message)

        made.text += f"<{HEADERS[role]}>\n{content}\n"
        is_learned = mark.get("train", HEADERS[role] == "assistant") and mark.get("weight") != 0
        made.learned += f"{content}\n" * bool(is_learned and content.strip())
    return made


def completion(prompt: str, answer: str) -> Made:
    return Made({"prompt": prompt, "completion": answer}, prompt + answer, answer)


def alpaca(asked: str, more: str, answer: str) -> Made:
    record = {"instruction": asked, "input": more, "output": answer, "text": "all", "id": "7"}
    question = f"{asked}\n{more}" if more else asked
    text = f"<user>\n{question}\n<assistant>\n{answer}\n"
    taught = f"{answer}\n" * bool(answer.strip())
    left_out = [("key text", 3), ("key id", 1)]
    return Made(record, text, taught, left_out, roles=["user", "assistant"])


def plain(text: str) -> Made:
    return Made({"text": text, "meta": {"n": "1"}}, text, text, [("key meta", 10)])


RECORDS = st.one_of(
    st.builds(chat, st.sampled_from(["messages", "conversations"]), TURNS),
    st.builds(completion, WORDS, WORDS.filter(bool)),
    st.builds(alpaca, WORDS, WORDS, WORDS),
    st.builds(plain, WORDS.filter(str.strip)),
    st.just(Made({"text": None})),
)


def in_parts(made: Made) -> Made:
    """Return a record with the contents of its messages as OpenAI's parts."""
    changed: dict[str, typing.Any] = {}
    for key, value in made.record.items():
        if key in ("messages", "conversations"):
            changed[key] = [_in_parts(message, made) for message in value]
    return dataclasses.replace(made, record=made.record | changed)


def _in_parts(message: dict[str, typing.Any], made: Made) -> dict[str, typing.Any]:
    name = "content" if "content" in message else "value"
    parts = [{"type": "output_text", "text": message[name]}]
    if message[name]:
        made.left_out.append(("part thinking", size(message[name])))
        parts.append({"type": "thinking", "thinking": message[name]})
    return message | {name: parts}


def in_json(made: Made) -> Made:
    """Return a record with its messages as JSON text."""
    lists = {key: value for key, value in made.record.items() if isinstance(value, list)}
    texts = {key: json.dumps(value) for key, value in lists.items()}
    return dataclasses.replace(made, record=made.record | texts)


def in_columns(made: Made) -> Made:
    """Return a record with its messages as a list for each of their keys."""
    columns: dict[str, typing.Any] = {}
    for key, value in made.record.items():
        if isinstance(value, list) and value:
            names = dict.fromkeys(name for message in value for name in message)
            columns[key] = {name: [message.get(name) for message in value] for name in names}
    return dataclasses.replace(made, record=made.record | columns)


FORMS = {"messages": lambda made: made, "parts": in_parts, "json": in_json, "columns": in_columns}


@hypothesis.settings(max_examples=300)
@hypothesis.given(
    st.lists(RECORDS, min_size=1, max_size=6),
    st.sampled_from([".jsonl", ".json", ".parquet", ".arrow"]),
    st.sampled_from(sorted(FORMS)),
)
def test_every_text_is_learned_masked_or_left_out(made: list[Made], suffix: str, form: str):
    is_table = suffix in (".parquet", ".arrow")
    # A column has one type: a struct of lists cannot hold an empty list of messages
    hypothesis.assume(not is_table or form != "columns" or all(one.roles != [] for one in made))
    made = [FORMS[form](dataclasses.replace(one, left_out=[*one.left_out])) for one in made]
    records = [one.record for one in made]
    if is_table:
        keys = sorted({key for record in records for key in record})
        records = [{key: record.get(key) for key in keys} for record in records]

    with tempfile.TemporaryDirectory() as folder:
        path = written(pathlib.Path(folder, f"x{suffix}"), records)
        options = {"output": pathlib.Path(folder, "d"), "val_share": 0.0, "mask_prompts": True}
        chats = [one for one in made if one.roles]
        unanswered = sum(one.is_unanswered for one in chats)
        if 2 * unanswered > len(chats) or not any(one.learned for one in made):
            refusal = r"teach nothing: .*rename the roles|no token would be|no training text"
            with pytest.raises(errors.UserError, match=refusal):
                run(path, **options)
            return

        dataset = run(path, **options)
        assert decoded(dataset) == [one.text.encode() for one in made if one.text]
        assert learned(dataset) == size("".join(one.learned for one in made))
        described = manifest(dataset)
        assert described["not_read"] == _left_out(made, is_table=is_table)
        idle = sum(not one.learned for one in chats)
        assert described["lessons"]["conversations"] == len(chats)
        assert sum(described["lessons"]["teach_nothing"].values()) == idle
        assert any(
            f"{idle} of {len(chats)} conversations" in line for line in dataset.not_learned
        ) == (idle > 0)


def _left_out(made: list[Made], *, is_table: bool) -> dict[str, list[int]]:
    """Return the manifest's expected list; a table's other columns lack a size."""
    found: dict[str, list[int]] = collections.defaultdict(lambda: [0, 0])
    for one in made:
        for name, num_bytes in one.left_out:
            if not (is_table and name in ("key meta", "key id")):
                found[name][0] += 1
                found[name][1] += num_bytes
        if not one.text:
            found["record without text"][0] += 1
    if is_table:
        for column in ("meta", "id"):
            if any(column in one.record for one in made):
                found[f"column {column}"] = [len(made), 0]
    return found


@pytest.mark.parametrize("content", [None, [{"type": "image_url", "text": None}], 1])
def test_a_message_that_is_no_text_is_refused_with_its_line(
    content: object, tmp_path: pathlib.Path
):
    turns = [{"role": "user", "content": "4?"}, {"role": "assistant", "content": content}]
    for one in ({"messages": turns}, {"prompt": turns[:1], "completion": turns[1:]}):
        with pytest.raises(
            errors.UserError,
            match=r"x\.jsonl line 1: a message's content is (None|'image_url'|1); only",
        ):
            read(written(tmp_path / "x.jsonl", [one]))


@pytest.mark.parametrize("messages", ["hello", 12, {"role": ["user"], "content": "hello"}])
def test_messages_that_are_no_list_are_refused_with_their_type(
    messages: object, tmp_path: pathlib.Path
):
    kind = type(messages).__name__
    with pytest.raises(
        errors.UserError, match=rf'x\.jsonl line 1: .*; "messages" is of the type {kind}, not'
    ):
        read(written(tmp_path / "x.jsonl", [{"messages": messages}]))


def test_completions_may_be_messages(tmp_path: pathlib.Path):
    asked = [{"role": "user", "content": "4?"}, {"role": "assistant", "content": "no"}]
    record = {"prompt": asked, "completion": [{"role": "model", "content": "yes"}]}
    path = written(tmp_path / "x.jsonl", [record])
    dataset = run(path, output=tmp_path / "d", val_share=0.0, mask_prompts=True)
    assert decoded(dataset) == [b"<user>\n4?\n<assistant>\nno\n<assistant>\nyes\n"]
    assert learned(dataset) == len("yes\n")


def test_surrogates_are_cleaned_for_every_tokenizer(tmp_path: pathlib.Path):
    (tmp_path / "chat.jsonl").write_text(
        '{"text": "cut emoji \\ud83d"}\n{"text": "whole \\ud83d\\ude00"}\n'
    )
    for kind in ("byte", "gpt2"):
        run(tmp_path / "chat.jsonl", output=tmp_path / kind, tokenizer=kind, val_share=0.0)
    found = [one.decode() for one in decoded(shards.open_dataset(tmp_path / "byte"))]
    assert found == ["cut emoji \ufffd", "whole \U0001f600"]
