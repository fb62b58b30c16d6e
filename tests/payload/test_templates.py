"""Conversations in a tokenizer's own chat template: the assistant's words are learned."""

# pyright: basic, reportPrivateImportUsage=false
import json
import pathlib
import typing

import conftest
import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
from builders import manifest, run
from builders import records as written

from ddptrain.data import chats, lessons, shards
from ddptrain.data import tokenizers as payload_tokenizers

tokenizers = pytest.importorskip("tokenizers", reason="transformers is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

# ChatML as Qwen 2.5 writes it: tool calls, no reasoning
CHATML = (
    "{% if tools %}<|s|>tools\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}<|e|>\n{% endif %}"
    "{% for m in messages %}<|s|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<call>{{ c.function.name }}"
    "{{ c.function.arguments | tojson }}</call>{% endfor %}<|e|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|s|>assistant\n{% endif %}"
)
# With transformers' tag, and the reasoning of the last answer alone, as Qwen 3 has it
TAGGED = (
    "{% for m in messages %}<|s|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% generation %}{% if loop.last and m.reasoning_content %}<think>{{ m.reasoning_content }}"
    "</think>{% endif %}{{ m.content }}<|e|>\n{% endgeneration %}"
    "{% else %}{{ m.content }}<|e|>\n{% endif %}{% endfor %}"
)
# An answer's text depends on whether it is the last: without the tag its part is not clear
LAST_ONLY = (
    TAGGED.replace("{% generation %}", "")
    .replace("{% endgeneration %}", "")
    .replace(
        "{{ m.content }}<|e|>\n",
        "{% if loop.last %}<think></think>{% endif %}{{ m.content }}<|e|>\n",
        1,
    )
)
# As Llama 2's and Gemma's, it refuses what does not alternate
STRICT = "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}" + (
    "{{ raise_exception('Conversation roles must alternate') }}{% endif %}{% endfor %}" + CHATML
)


def saved(folder: pathlib.Path, template: str) -> pathlib.Path:
    """Save a tokenizer with a chat template."""
    core = tokenizers.Tokenizer(tokenizers.models.BPE())
    core.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<end>", "<|s|>", "<|e|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator([conftest.prose(50)], trainer)
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<end>")
    fast.chat_template = template
    fast.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def loaded(
    tmp_path_factory: pytest.TempPathFactory,
) -> typing.Callable[[str], payload_tokenizers.HfTokenizer]:
    made: dict[str, payload_tokenizers.HfTokenizer] = {}

    def load(template: str) -> payload_tokenizers.HfTokenizer:
        if template not in made:
            folder = saved(tmp_path_factory.mktemp("tokenizer"), template)
            made[template] = payload_tokenizers.HfTokenizer(folder)
        return made[template]

    return load


WORDS = st.text(st.characters(codec="utf-8"), max_size=8)
MESSAGES = st.builds(
    lambda role, text, learned, more: chats.Message(role, text, learned=learned, more=more),
    st.sampled_from(["user", "assistant", "system", "tool", "narrator"]),
    WORDS,
    st.booleans(),
    st.sampled_from([{}, {"reasoning_content": "hmm"}, {"id": 7}]),
)


@hypothesis.settings(max_examples=300, suppress_health_check=[hypothesis.HealthCheck.too_slow])
@hypothesis.given(
    template=st.sampled_from([CHATML, TAGGED]),
    messages=st.lists(MESSAGES, min_size=1, max_size=5),
)
def test_every_text_is_learned_masked_or_left_out(
    loaded: typing.Callable[[str], payload_tokenizers.HfTokenizer],
    template: str,
    messages: list[chats.Message],
):
    tokenizer = loaded(template)
    found = lessons.Lessons()
    document = tokenizer.form.write(chats.Chat(tuple(messages)), found)
    if document is None:
        assert template == TAGGED  # a learned message of another party lacks a tag
        assert any(one.learned and one.role != "assistant" for one in messages)
        assert found.left_out[lessons.REFUSED][1] == len("".join(m.text for m in messages).encode())
        return

    expected: list[tuple[str, bool]] = []
    num_left = sum(bool(message.more) for message in messages)
    for number, message in enumerate(messages):
        is_last = number == len(messages) - 1
        reasoning = message.more.get("reasoning_content")
        is_answer = message.role == "assistant"
        has_reasoning = template == TAGGED and is_answer and is_last and reasoning
        body = ""
        if has_reasoning:
            body = f"<think>{reasoning}</think>"
            num_left -= 1
        body += f"{message.text}<|e|>\n"
        is_learned = message.learned and bool(message.text.strip() or reasoning)
        header = f"<|s|>{message.role}\n"
        if is_answer or not is_learned:
            expected += [(header, False), (body, is_learned)]
        else:
            expected.append((header + body, True))

    ids, learned = next(iter(payload_tokenizers.encode(tokenizer, document)))
    texts = [tokenizer.encode(text) for text, _ in expected]
    assert ids.tolist() == np.concatenate(texts).tolist()
    masks = [np.full(len(own), taught) for own, (_, taught) in zip(texts, expected, strict=True)]
    assert np.asarray(learned).tolist() == np.concatenate(masks).tolist()
    assert sum(count for count, _ in found.left_out.values()) == num_left
    assert sum(found.idle.values()) == (not any(is_learned for _, is_learned in expected))


def test_the_mask_is_transformers_own(
    loaded: typing.Callable[[str], payload_tokenizers.HfTokenizer], tmp_path: pathlib.Path
):
    tokenizer = transformers.AutoTokenizer.from_pretrained(saved(tmp_path, TAGGED))
    messages = [
        {"role": "user", "content": "the time"},
        {"role": "assistant", "content": "is now", "reasoning_content": "a clock"},
    ]
    theirs = tokenizer.apply_chat_template(messages, return_assistant_tokens_mask=True)
    read = chats.read(messages, "here", lessons.Lessons())
    ours = loaded(TAGGED)
    document = ours.form.write(chats.Chat(tuple(read)), lessons.Lessons())
    ids, learned = next(iter(payload_tokenizers.encode(ours, document or ())))
    assert ids.tolist() == theirs["input_ids"]
    assert np.asarray(learned).tolist() == [mask == 1 for mask in theirs["assistant_masks"]]


def test_tool_calls_are_learned_and_tools_are_read(tmp_path: pathlib.Path):
    call = {"type": "function", "function": {"name": "clock", "arguments": '{"zone": "UTC"}'}}
    record = {
        "messages": [
            {"role": "user", "content": "the time"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": "12:00", "tool_call_id": "1"},
            {"role": "assistant", "content": "noon", "reasoning_content": "a clock"},
        ],
        "tools": json.dumps([{"type": "function", "function": {"name": "clock"}}]),
    }
    dataset = prepared(tmp_path, CHATML, [record])
    read, learned = texts_of(dataset, tmp_path)
    assert '"name": "clock"' in read
    assert learned == '<call>clock{"zone": "UTC"}</call><|e|>\nnoon<|e|>\n'
    assert manifest(dataset)["not_read"] == {
        "key tool_call_id": [1, 1],
        "key reasoning_content": [1, 7],
    }


def test_without_a_clear_template_tool_calls_are_named_as_left_out(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
):
    turns = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", "reasoning": "c"},
    ]
    dataset = prepared(tmp_path, LAST_ONLY, [{"messages": turns}])
    assert texts_of(dataset, tmp_path) == ("<user>\na\n<assistant>\nb\n", "b\n")
    assert manifest(dataset)["not_read"] == {"key reasoning": [1, 1]}
    assert "chat template is not used: it does not show the assistant's part" in caplog.text


def test_conversations_that_the_template_refuses_are_named_with_its_words(tmp_path: pathlib.Path):
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    dataset = prepared(tmp_path, STRICT, [{"messages": turns}, {"messages": turns[1:]}])
    assert dataset.not_learned == (
        "1 of 2 conversations teach nothing: conversation that the chat template refuses: "
        "Conversation roles must alternate",
        "not read: conversation that the chat template refuses 1 (1 bytes)",
    )
    assert manifest(dataset)["totals"]["train"]["docs"] == 1


def prepared(
    folder: pathlib.Path, template: str, records: list[dict[str, typing.Any]]
) -> shards.Dataset:
    tokenizer = saved(folder / "tokenizer", template)
    path = written(folder / "chat.jsonl", records)
    options = {"output": folder / "d", "tokenizer_local_dir": tokenizer}
    return run(path, **options, val_share=0.0, mask_prompts=True)


def texts_of(dataset: shards.Dataset, folder: pathlib.Path) -> tuple[str, str]:
    """Return the text of a dataset without the ends of documents, and what of it is learned."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "tokenizer")
    (shard,) = dataset.splits["train"]
    tokens = np.fromfile(shard.path, dtype=shard.dtype, offset=shards.HEADER_BYTES)
    tokens = tokens[tokens != dataset.tokenizer["eot_id"]]
    ids = tokens & ((1 << 15) - 1)
    return tokenizer.decode(ids.tolist()), tokenizer.decode(tokens[tokens == ids].tolist())
