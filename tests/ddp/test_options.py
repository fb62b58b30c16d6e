"""An option is declared once: the flag, the action's parameter, the directive, the check and the reference follow."""

import dataclasses
import typing

import pydantic
import pytest
import yaml
from cluster import Cluster
from pip_double import Pip

from ddp import cli, readiness, verbs
from ddp.base import ParameterError, Settings
from ddp.options import declared, fields, models
from scripts import actions

MEANING = "At most so many switches between the nodes."


class Submit(fields.SubmitDdp):
    """Parameters of submit-ddp, with one more that Slurm has, and one of the program's own."""

    switches: typing.Annotated[
        typing.Annotated[int, fields.STRICT, fields.between(1, 64)] | None, fields.Directive("switches")
    ] = pydantic.Field(None, description=MEANING)
    spread_job: typing.Annotated[fields.Flag, fields.Directive("spread-job")] = pydantic.Field(
        False, description="Spread the job over many nodes."
    )
    mood: fields.Name | None = pydantic.Field(None, description="Nothing that Slurm knows.")


@pytest.fixture
def one_more(monkeypatch: pytest.MonkeyPatch, settings: Settings, cluster: Cluster, pip: Pip) -> Cluster:
    """Return the cluster of a program whose `submit` has these options, too."""
    verb = dataclasses.replace(verbs.ALL["submit-ddp"], params=Submit)
    for table in (verbs.ALL, verbs.ACTIONS):
        monkeypatch.setitem(table, verb.action, verb)
    for command in (cli._command(verb), cli._render_command()):
        monkeypatch.setitem(cli.program.commands, str(command.name), command)
    monkeypatch.setattr(cli, "settings_of", lambda _: settings)
    monkeypatch.setattr(readiness, "require", lambda *_, **__: None)
    return cluster


def ddp(*words: str) -> object:
    return cli.program.main(list(words), prog_name="ddp", standalone_mode=False)


@pytest.mark.parametrize("command", [("submit", "--dry-run"), ("render",)])
def test_a_flag_becomes_a_directive(one_more: Cluster, capsys: pytest.CaptureFixture[str], command: tuple[str, ...]):
    assert ddp(*command, "--switches", "3", "--spread-job", "--mood", "good", "smoke") == cli.OK
    script = capsys.readouterr().out
    assert "#SBATCH --switches=3\n" in script
    assert "#SBATCH --spread-job\n" in script
    assert "mood" not in script.partition("exec ")[0]
    assert not [call for call in one_more.changes if call[0] == "sbatch"]


def test_what_is_not_given_is_no_directive(one_more: Cluster, capsys: pytest.CaptureFixture[str]):
    assert ddp("submit", "--dry-run", "smoke") == cli.OK
    script = capsys.readouterr().out
    assert "#SBATCH --nodes=" in script
    assert "switches" not in script
    assert "spread-job" not in script
    assert one_more.judged


def test_the_action_has_it_and_the_reference_page(one_more: Cluster):
    params = yaml.safe_load(actions.render())["actions"]["submit-ddp"]["params"]
    assert params["switches"] == {"type": "integer", "minimum": 1, "maximum": 64, "description": MEANING}
    section = actions.page().partition("\n## ddp submit\n")[2].partition("\n## ")[0]
    assert f"| `--switches` | 1 to 64 |  | {MEANING} |\n" in section
    assert not one_more.calls


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"switches": 65}, "switches: 65 is not allowed; a whole number from 1 to 64"),
        ({"sbatch": "--switches=3"}, "sbatch: --switches has an option of its own; give switches"),
    ],
)
def test_it_is_checked(given: dict[str, object], line: str):
    with pytest.raises(ParameterError) as caught:
        fields.parse(Submit, given)
    assert str(caught.value) == line
    assert fields.parse(fields.SubmitDdp, {"sbatch": "--switches=3"}).sbatch, "where it has none it passes through"


def test_no_directive_of_a_job_can_be_given_past_its_option(one_more: Cluster, capsys: pytest.CaptureFixture[str]):
    """What is worked out stands in one table; each line of it has an option, or is refused."""
    assert ddp("render", "--gpus-per-node", "0", "--time-limit", "10", "smoke") == cli.OK
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("#SBATCH --")]
    names = {line.removeprefix("#SBATCH --").partition("=")[0] for line in lines}
    assert {"nodes", "mem", "time", "output", "requeue", "signal"} <= names
    for name in names:
        with pytest.raises(ParameterError, match=rf"^sbatch: --{name} (has an option of its own|is set by the job)"):
            fields.parse(fields.SubmitDdp, {"sbatch": f"--{name}=1"})
    assert one_more.calls


def test_an_option_has_one_way_to_sbatch():
    own = {directive.name for directive in fields.directives(fields.SubmitDdp).values()}
    assert not own & set(fields.SBATCH_KEPT)
    assert {"partition", "time", "mem", "mail-type", "dependency", "exclusive"} <= own


def test_verbs_that_ask_for_a_place_share_what_is_given():
    params = fields.parse(models.Doctor, {"partition": "gpu", "account": "physics", "nodes": "n1"})
    assert declared.directives(params) == [("account", "physics")]
    assert declared.shared(params, models.BenchmarkCollectives) == {"partition": "gpu", "account": "physics"}
