"""Records in all their shapes: what is learned of them, and what is refused."""

# pyright: basic, reportPrivateImportUsage=false
import pathlib
import tempfile
import typing

import hypothesis
import hypothesis.strategies as st
import pytest
from builders import decoded, not_read, read, run
from builders import records as written

from ddptrain.data import shards
from ddptrain.ground import errors

WORDS = st.text(st.characters(codec="utf-8"), max_size=8)
ROLES = {"user": False, "human": False, "system": False, "assistant": True, "gpt": True}
MARKS = [
    {},
    {"weight": 0},
    {"weight": 1},
    {"train": False},
    {"train": True},
    {"weight": 0, "train": True},
]
TURNS = st.lists(
    st.tuples(st.sampled_from(sorted(ROLES)), WORDS, st.sampled_from(MARKS)), max_size=4
)


def chat(
    key: str, turns: list[tuple[str, str, dict[str, typing.Any]]]
) -> tuple[dict[str, typing.Any], int]:
    """Return a conversation and the number of the bytes that are learned of it."""
    role, content = ("role", "content") if key == "messages" else ("from", "value")
    learned = [
        f"{c}\n" * mark.get("train", ROLES[r])
        for r, c, mark in turns
        if c.strip() and mark.get("weight") != 0
    ]
    return {key: [{role: r, content: c} | mark for r, c, mark in turns]}, len(
        "".join(learned).encode()
    )


RECORDS = st.one_of(
    st.builds(chat, st.sampled_from(["messages", "conversations"]), TURNS),
    st.builds(
        lambda p, c: ({"prompt": p, "completion": c}, len(c.encode())), WORDS, WORDS.filter(bool)
    ),
    st.builds(
        lambda i, m, o: (
            {"instruction": i, "input": m, "output": o, "text": "all"},
            len(f"{o}\n".encode()) * bool(o.strip()),
        ),
        WORDS,
        WORDS,
        WORDS,
    ),
    st.builds(lambda t: ({"text": t}, len(t.encode())), WORDS.filter(str.strip)),
    st.just(({"text": None}, 0)),
)


def as_parts(one: dict[str, typing.Any], count: int) -> tuple[dict[str, typing.Any], int]:
    """Return a record with the contents of its messages as parts, and prompt and completion as TRL's messages."""
    if "completion" in one:
        roles = {"prompt": "user", "completion": "assistant"}
        count = (count + 1) * bool(one["completion"].strip())
        one = {key: [{"role": roles[key], "content": text}] for key, text in one.items()}
    parts = {
        key: [
            m | {k: [{"type": "text", "text": m[k]}] for k in ("content", "value") if k in m}
            for m in value
        ]
        for key, value in one.items()
        if isinstance(value, list)
    }
    return one | parts, count


@hypothesis.settings(max_examples=300)
@hypothesis.given(
    st.lists(RECORDS, min_size=1, max_size=6),
    st.sampled_from([".jsonl", ".json", ".parquet", ".arrow"]),
    st.booleans(),
)
def test_learned_tokens_are_those_of_the_assistants_turns(
    made: list[tuple[dict[str, typing.Any], int]], suffix: str, in_parts: bool
):
    made = [as_parts(*one) for one in made] if in_parts else made
    keys = sorted({key for one, _ in made for key in one})
    if suffix in (".parquet", ".arrow"):
        made = [({key: one.get(key) for key in keys}, count) for one, count in made]
    chats = [
        {ROLES[m.get("role") or m["from"]] for m in one.get("messages") or one["conversations"]}
        for one, _ in made
        if one.get("messages") or one.get("conversations")
    ]
    unanswered = sum(True not in chat for chat in chats)
    with tempfile.TemporaryDirectory() as folder:
        path, expected = (
            written(pathlib.Path(folder, f"x{suffix}"), [one for one, _ in made]),
            sum(n for _, n in made),
        )
        alpaca = sum(
            one.get("instruction") is not None or isinstance(one.get("prompt"), list)
            for one, _ in made
        )
        if 2 * unanswered > len(chats) + alpaca or not expected:
            with pytest.raises(
                errors.UserError,
                match=r"no message of the role assistant.*roles found|no token would be|no training text",
            ):
                run(path, output=pathlib.Path(folder, "d"), val_share=0.0, mask_prompts=True)
            return
        dataset = run(path, output=pathlib.Path(folder, "d"), val_share=0.0, mask_prompts=True)
        assert (
            sum(shards.num_learned(s, 256, masked=True) for s in dataset.splits["train"])
            == expected
        )
        empty = sum(not any(one.values()) for one, _ in made)
        assert not_read(dataset) == ({"record without text": [empty, 0]} if empty else {})


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


def test_surrogates_are_cleaned_for_every_tokenizer(tmp_path: pathlib.Path):
    (tmp_path / "chat.jsonl").write_text(
        '{"text": "cut emoji \\ud83d"}\n{"text": "whole \\ud83d\\ude00"}\n'
    )
    for kind in ("byte", "gpt2"):
        run(tmp_path / "chat.jsonl", output=tmp_path / kind, tokenizer=kind, val_share=0.0)
    found = [one.decode() for one in decoded(shards.open_dataset(tmp_path / "byte"))]
    assert found == ["cut emoji \ufffd", "whole \U0001f600"]
