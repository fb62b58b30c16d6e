"""`--again`: what stands for the newest checkpoint, and the attempts that get it."""

import os
import pathlib
import typing

import pytest
from hypothesis import given
from hypothesis import strategies as st
from job_specs import job_files, make

from batch_host import Node
from ddp.node import continuation
from ddp.options import fields, models
from ddp.problem import ParameterError

COUNTS = 'echo "$RUN_ATTEMPT_ID" >> "$NOTES/attempts"; n=$(wc -l < "$NOTES/attempts"); '
NOTES_WORDS = 'printf "%s\\n" "${*: -2}" >> "$NOTES/words"; '
LATEST = ("--resume", "{latest:out/checkpoint-*}")


@pytest.fixture
def node(tmp_path: pathlib.Path) -> Node:
    return Node(tmp_path, tmp_path / "shared" / "runs" / "first")


def save(folder: pathlib.Path, *steps: int) -> None:
    """Make checkpoints, one after the other."""
    for order, step in enumerate(steps):
        path = folder / f"checkpoint-{step}"
        path.mkdir(parents=True)
        os.utime(path, (1000 + order, 1000 + order))


def fill_in(place: pathlib.Path, *words: str) -> continuation.Filled:
    return continuation.fill_in(words, str(place / "run"), str(place))


def test_the_newest_folder_of_a_pattern_stands_in_the_word(tmp_path: pathlib.Path):
    save(tmp_path / "out", 5, 100, 20)
    filled = fill_in(tmp_path, "--from={latest:out/checkpoint-*}/model.pt", "x")
    assert filled.words == (f"--from={tmp_path}/out/checkpoint-20/model.pt", "x")
    assert not filled.missing


def test_of_folders_of_the_same_time_the_highest_number_is_the_newest(tmp_path: pathlib.Path):
    save(tmp_path / "out", 9, 100, 20)
    for path in (tmp_path / "out").iterdir():
        os.utime(path, (1000, 1000))
    assert fill_in(tmp_path, LATEST[1]).words == (f"{tmp_path}/out/checkpoint-100",)


def test_a_folder_without_the_file_that_is_written_last_is_left_out(tmp_path: pathlib.Path):
    save(tmp_path / "run" / "out", 10, 20)
    word = "{latest:$RUN_DIR/out/checkpoint-*:state.json}"
    assert fill_in(tmp_path, word).missing == f"{tmp_path}/run/out/checkpoint-*/state.json"
    (tmp_path / "run/out/checkpoint-10/state.json").touch()
    assert fill_in(tmp_path, word).words == (f"{tmp_path}/run/out/checkpoint-10",)


@given(st.text(st.characters(exclude_characters="{}")), st.text(st.characters(codec="ascii")))
def test_words_without_a_pattern_stay_as_they_are(before: str, after: str):
    word = before + after.replace("{latest", "")
    continuation.check([word])
    assert continuation.fill_in([word], "/none", "/none").words == (word,)


@pytest.mark.parametrize("args", ["{latest}", "--x {latest:}", "{latest:a:b:c}", "a{latest:b"])
def test_a_mistyped_pattern_is_refused_at_the_submission(args: str):
    with pytest.raises(ParameterError, match=r"write \{latest:PATTERN\}, such as"):
        fields.parse(models.SubmitDdp, {"workload": "/x/train.py", "again": args})


def run(node: Node, ends: str, **more: typing.Any) -> list[str]:
    """Run a job whose attempts fail twice; return the last two words of each attempt."""
    node.add("srun", COUNTS + NOTES_WORDS + ends + "[ $n = 3 ]")
    job = make(node.run_dir, max_restarts=2, **more)
    code, output = node.run(job_files(job))
    assert code == 0, output
    return (node.notes / "words").read_text().splitlines()


def test_only_attempts_with_a_checkpoint_get_the_arguments(node: Node):
    save(node.run_dir / "out", 7)  # a copy of the project may bring an old one
    ends = (
        'if [ $n = 1 ]; then rm -r "$RUN_DIR/out"; else mkdir -p "$RUN_DIR/out/checkpoint-$n"; fi; '
    )
    words = run(node, ends, again=LATEST)
    assert words[0].endswith("train.py")
    assert words[1].endswith("train.py"), "nothing is saved yet"
    assert words[2] == f"--resume {node.run_dir}/out/checkpoint-2"


def test_arguments_without_a_pattern_wait_for_a_file_that_the_run_wrote(node: Node):
    (node.run_dir / "given.pt").parent.mkdir(parents=True)
    (node.run_dir / "given.pt").touch()
    os.utime(node.run_dir / "given.pt", (1000, 1000))
    ends = '[ $n = 2 ] && touch "$RUN_DIR/ckpt.pt"; '
    words = run(node, ends, again=("--resume", "auto"))
    assert [line.endswith("--resume auto") for line in words] == [False, False, True]


def test_another_job_of_the_run_continues_from_its_first_attempt_on(node: Node):
    node.add("srun", COUNTS + NOTES_WORDS + 'mkdir -p "$RUN_DIR/out/checkpoint-$n"')
    files = job_files(make(node.run_dir, again=LATEST))
    node.run(files)
    code, output = node.run(files, SLURM_JOB_ID="13")
    assert code == 0, output
    assert (node.notes / "words").read_text().splitlines()[1].startswith("--resume /")
    assert "[RESTART] it continues with: --resume" in output
