"""The verdict on cards ignores unread parts of nvidia-smi's output; one cause drains few nodes."""

import itertools
import json
import re
import time

import hypothesis
import pytest
from health_scene import BUS, Scene, hold
from hypothesis import strategies as st
from smi_samples import HEALTHY, answer

from gpu import smi
from node import fleet, health
from slurm_ddp.slurm import nodes

PROCESS = "<process_info><pid>42</pid><process_name>{}</process_name><used_memory>1 MiB</used_memory></process_info>"
BAD = HEALTHY | {"remapped_rows/remapped_row_failure": "Yes"}
CLOCKS = "<supported_clocks><a>1 MHz</a></supported_mem_clock><supported_mem_clock>5 MHz</supported_clocks>"
FORGED = "</process_name> </process_info> </processes> </gpu> \n <gpu id='00000000:09:00.0'> & ]]> \0 <processes>".split()
TABLE = "00000000:01:00.0, {}\n".format(", ".join(["No"] * 3 + ["0"] * 5))
names = st.lists(
    st.one_of(
        st.sampled_from([*FORGED, "<gpu_recovery_action>Reset</gpu_recovery_action>"]), st.text()
    )
)


def busy(printed: str, name: str) -> str:
    """Let each card run such a process."""
    return printed.replace("</gpu>", f"<processes>{PROCESS.format(name)}</processes>{CLOCKS}</gpu>")


@hypothesis.settings(max_examples=300)
@hypothesis.given(
    cards=st.lists(st.sampled_from([HEALTHY, BAD]), min_size=1, max_size=3),
    name=names,
    before=st.text(),
    after=st.text(),
)
def test_no_process_and_nothing_around_the_document_changes_a_verdict(
    cards: list[dict[str, str]], name: list[str], before: str, after: str
):
    read = smi.read(f"{before}{busy(answer(*cards), ''.join(name))}{after}")
    assert [[finding.check for finding in health.judge(card)] for card in read] == [
        ["row-remap"] if card is BAD else [] for card in cards
    ]


@pytest.mark.parametrize(
    "name", ["python train.py --tag=a&b<c", "python\1\2 train", "".join(FORGED)]
)
@pytest.mark.parametrize(("card", "code"), [(HEALTHY, 0), (BAD, 1)])
def test_a_process_is_no_fault_of_a_card(scene: Scene, name: str, card: dict[str, str], code: int):
    scene.smi(busy(answer(card), name))
    assert scene.check() == code


@pytest.mark.parametrize(("card", "level"), [(HEALTHY, "warn"), (BAD, "drain")])
@pytest.mark.parametrize("form", ["{line}\n{xml}", "{xml}{line}\n", "{xml}\n\n {line} "])
def test_a_line_around_the_document_is_a_warning(
    scene: Scene, capsys: pytest.CaptureFixture[str], card: dict[str, str], level: str, form: str
):
    """nvidia-smi -q -x exits with 0 on a corrupt infoROM."""
    line = f"WARNING: infoROM is corrupted at gpu {BUS}"
    scene.smi(form.format(line=line, xml=busy(answer(card), "python")))
    assert scene.check() == health.EXIT_STATUS[level]
    out = json.loads(capsys.readouterr().out)
    assert [one["text"] for one in out["findings"] if one["level"] == "warn"] == [
        f"nvidia-smi: {line}"
    ]


line_of_text = st.text(
    st.characters(exclude_categories=["Cc", "Cs", "Zl", "Zp"], exclude_characters="<")
)


@hypothesis.settings(max_examples=300)
@hypothesis.given(
    before=st.lists(line_of_text, max_size=8), after=st.lists(line_of_text, max_size=8), name=names
)
def test_each_line_around_the_document_is_in_a_remark(
    before: list[str], after: list[str], name: list[str]
):
    document = busy(answer(HEALTHY), "".join(name))
    found = smi.remarks("\n".join([*before, document, *after]))
    lines = [" ".join(line.split())[:120] for line in (*before, *after)]
    printed = list(dict.fromkeys(line for line in lines if line))
    assert found[:5] == printed[:5]
    assert len(found) == min(len(printed), 6)


@pytest.mark.parametrize(
    ("table", "code", "level"),
    [
        (TABLE, 0, "warn"),
        (TABLE.replace("No", "Yes"), 0, "drain"),
        ("", 2, "warn"),
        ("x, y", 0, "warn"),
        ("", 15, "drain"),
    ],
)
def test_unreadable_parts_are_a_warning_and_asked_for_elsewhere(
    scene: Scene, capsys: pytest.CaptureFixture[str], table: str, code: int, level: str
):
    xml = answer(HEALTHY).replace("<remapped_rows>", "<remapped_rows><x>")
    scene.program(
        "nvidia-smi",
        f"case $1 in -q) cat <<'E'\n{xml}E\n;; *) printf '{table}'; exit {code};; esac",
    )
    assert scene.check() == health.EXIT_STATUS[level]
    out = json.loads(capsys.readouterr().out)
    assert (out["result"], len(scene.commands)) == (level, level == "drain")
    if code != 15:
        assert re.search(
            r"cannot be read: remapped_rows: '.*remapped_row", out["findings"][0]["text"]
        )


@hypothesis.given(
    groups=st.lists(st.integers(1, 7), min_size=1, max_size=5),
    pause=st.integers(1, 60),
    data=st.data(),
)
def test_a_third_of_the_nodes_at_most_is_drained_for_one_cause(
    groups: list[int], pause: int, data: st.DataObject
):
    """The nodes of a group check at the same time: each looks, drains, and looks again."""
    names = data.draw(st.permutations([f"n{i:02}" for i in range(sum(groups))]))
    drained: dict[str, float] = {}

    def shared(name: str, cause: str, now: float) -> bool:
        held = [
            (frozenset({"DRAIN"}), "gpu-health: 3 errors 0000:01:00.0; x"),
            (frozenset[str](), None),
        ]
        listed: list[nodes.Node] = []
        for one in names:
            flags, reason = held[one not in drained]
            listed.append(
                nodes.Node(
                    one, "IDLE", flags, None, reason, None, {"Partitions": "a"}, drained.get(one)
                )
            )
        return bool(fleet.shared(f"gpu-health: {cause}", name, listed, now))

    rest = iter(names)
    for i, size in enumerate(groups):
        now, cause = 1e9 + i * pause, f"{i} errors 0000:0{i}:00.0"
        looked = [name for name in itertools.islice(rest, size) if not shared(name, cause, now)]
        drained |= dict.fromkeys(looked, now)
        for name in data.draw(st.permutations(looked)):
            if shared(name, cause, now):
                del drained[name]
    assert len(drained) == max(1, len(names) // 3)
    at = 1e9 + len(groups) * pause
    assert not shared("n00", "another cause", at)
    assert not shared("n00", "3 errors", at + fleet.WINDOW_S + 1)


def test_a_card_that_is_the_fleets_case_is_a_warning_that_lasts(scene: Scene):
    text = (scene.root / "record").read_text().replace("Gres=", "Partitions=a Gres=")
    (scene.root / "record").write_text(text)
    now = time.strftime("%Y-%m-%dT%H:%M:%S")
    reason = f"Reason=gpu-health: row remapping failed: replace it 0000:41:00.0 [root@{now}]"
    other = (
        text.replace("=n0", "=n1")
        .replace("IDLE", "IDLE+DRAIN")
        .replace("ThreadsPerCore", f"{reason} Threads")
    )
    scene.smi(answer(BAD))
    (scene.root / "others").write_text(other)
    assert [scene.check() for _ in range(2)] == [2, 2]
    (scene.root / "others").write_text("")
    assert scene.check() == 2
    assert (scene.commands, hold()) == ([], None)
    assert (
        health.State.load().reason
        == f"gpu-health: row remapping failed: replace it: {health._SPARED}"
    )
    scene.smi(answer(HEALTHY))
    assert (scene.check(), health.State.load().reason) == (0, "")
