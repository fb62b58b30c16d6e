"""The charm's front end: its texts for operators, and that nothing below it knows Juju."""

import pathlib
import shlex
import time

import hypothesis
import pytest
import yaml
from hypothesis import strategies as st

from ddp import service
from ddp.actions import verbs
from ddp.problem import Command, Remedy, Step, plain
from ddp.settings import Settings
from ddp.slurm import remedies
from sandbox import values

LIBRARY = pathlib.Path(service.__file__).parent


@pytest.mark.parametrize(
    ("remedy", "typed", "run"),
    [
        (
            Command("submit", {"time-limit": 30}),
            "ddp submit --time-limit 30",
            "juju run t/leader submit-ddp time-limit=30",
        ),
        (
            Command("show", arguments=("nano1",)),
            "ddp show nano1",
            "juju run t/leader show-run run=nano1",
        ),
        (
            Command("cancel", arguments=("a", "b")),
            "ddp cancel a b",
            "juju run t/leader cancel-run run=a,b",
        ),
        (
            Command("env install", {"force": "true"}),
            "ddp env install --force",
            "juju run t/leader install-environment force=true",
        ),
        (
            Command("submit", {"args": "a b", "run": ""}),
            "ddp submit --args 'a b'",
            "juju run t/leader submit-ddp 'args=a b'",
        ),
        (Command("env create", arguments=("mine",)), "ddp env create mine", "ddp env create mine"),
        (
            remedies.START_SLURMCTLD,
            "is slurmctld up? see: scontrol ping",
            "is slurmctld up? else: juju integrate sackd slurmctld",
        ),
        (
            Step("change-option", "set x", {"option": "transformers", "value": "true"}),
            "set x",
            "juju config t transformers=true",
        ),
        (
            Step("list-number", "ddp list"),
            "ddp list",
            "juju run t/leader list-runs; Juju reads 40_3 as the number 403: for an element of a sweep type run='\"40_3\"'",
        ),
        (Step("of-no-front-end", "as root: do it"), "as root: do it", "as root: do it"),
    ],
)
def test_a_remedy_is_rendered_for_who_reads_it(remedy: Remedy, typed: str, run: str):
    assert plain(remedy) == typed
    assert service.render_remedy("t/0", remedy) == run


@hypothesis.given(
    st.text(st.characters(max_codepoint=0x2FFF, exclude_categories=["Cc", "Zl", "Zp"]))
    | st.text("yn-+.:# 019exob_'/,[]", max_size=8)
    | st.sampled_from(("on", "No", "null", "2024", "1e3", "010", "1-00:30:00", "90"))
)
def test_an_operators_line_says_the_same_in_juju(text: str):
    line = service.render_remedy("t/0", Command("submit", {"args": text} if text else {}))
    for word in shlex.split(line)[4:]:
        assert str(values.parse(word.removeprefix("args="))) == text


def test_settings_of_slurm_go_through_upstreams_charms():
    found = service.render_remedy("t/0", Step("slurm-conf", "set it", {"line": "KillWait=30"}))
    assert found.startswith("juju config slurmctld slurm-conf-parameters=")
    assert "KillWait=30" in found
    found = service.render_remedy(
        "t/0", Step("partition-conf", "set it", {"partition": "gpu", "line": "PreemptMode=requeue"})
    )
    assert found.startswith("juju config gpu partition-config=")


def test_no_module_below_the_front_ends_knows_juju():
    naming = {path.name for path in LIBRARY.rglob("*.py") if "juju" in path.read_text().lower()}
    assert naming <= {"service.py", "cli.py"}


def test_each_action_is_one_verbs():
    charm = yaml.safe_load(
        (LIBRARY.parents[1] / "charms" / "ddp-trainer" / "charmcraft.yaml").read_text()
    )
    assert set(charm["actions"]) == set(verbs.ACTIONS)
    assert len(verbs.ACTIONS) == sum(bool(verb.action) for verb in verbs.ALL.values())


def test_an_action_that_takes_long_shows_how_to_stop_it(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
):
    lines: list[str] = []

    def work(*_: object) -> dict[str, str]:
        for _turn in range(6000):
            if lines:
                break
            time.sleep(0.01)
        return {}

    monkeypatch.setattr(service, "_QUIET_S", 0.01)
    monkeypatch.setattr(verbs.Verb, "do_when_ready", work)
    request = {
        "do": "plan",
        "params": {},
        "task": "7",
        "unit": "t/0",
        "config": {"workspace": str(settings.workspace.path)},
    }
    assert service.answer(request, lines.append) == {"results": {}}
    assert lines == [
        "t/0 runs no other action while this one waits; to stop waiting, without cancelling a job: juju cancel-task 7"
    ]
