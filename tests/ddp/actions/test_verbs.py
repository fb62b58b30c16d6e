"""All verbs: the run that they take without a name, and which mistake they report first."""

import pathlib
import typing

import pytest
from cluster import NOT_CONFIGURED, Cluster
from run_verbs import Program

from ddp.actions import verbs
from ddp.options import declared, fields
from ddp.problem import Problem
from ddp.settings import Settings


@pytest.mark.parametrize("verb", ["show-run", "run-log", "resume-run"])
def test_the_newest_run_is_one_that_the_user_submitted(
    program: Program, cluster: Cluster, tmp_path: pathlib.Path, verb: str
):
    cluster.states = [("PENDING", 0)]
    program.run("submit-ddp", workload="smoke", run="mine")
    for name, more in (
        ("prepare-python-stdlib", '"kind": "prepare", "automatic": true'),
        ("s-0", '"sweep": "s"'),
    ):
        folder = program.workspace / "runs" / name
        (folder / "logs").mkdir(parents=True)
        (folder / "job.json").write_text(f'{{"job_id": 7, {more}}}')
    if verb == "run-log":
        assert program.fails(verb) == "job 40 has no output; it is PENDING; ddp show mine"
    else:
        assert program.run(verb)["run"] == "mine"


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("submit workload={}/tra1n.py", "/tra1n.py does not exist; did you mean train.py?"),
        ("sweep workload={}/tra1n.py", "/tra1n.py does not exist; did you mean train.py?"),
        ("render workload={}/tra1n.py", "/tra1n.py does not exist; did you mean train.py?"),
        (
            "cancel run=a",
            "no slurm.conf, no controller in DNS; use a login node, or see: scontrol ping",
        ),
        (
            "render workload=smoke",
            "Slurm is not configured here: no slurm.conf, no controller in DNS",
        ),
    ],
)
def test_without_slurm_the_users_own_mistake_is_reported_first(
    settings: Settings, cluster: Cluster, host: dict[str, typing.Any], words: str, line: str
):
    cluster.silent, cluster.silence = 99, NOT_CONFIGURED
    (settings.workspace.path / "train.py").touch()
    name, *given = words.format(settings.workspace.path).split()
    params = fields.parse(verbs.ALL[name].options, dict(one.split("=") for one in given))
    with pytest.raises(Problem) as caught:
        verbs.ALL[name].do_when_ready(settings, params, print)
    assert str(caught.value).endswith(line)


RUN = {
    verb: option.text.default
    for verb in verbs.ALL.values()
    for option in declared.options(verb.options)
    if option.name in ("run", "runs") and option.text.argument
}


@pytest.mark.parametrize(("verb", "default"), RUN.items(), ids=lambda one: getattr(one, "name", ""))
def test_a_verb_takes_the_newest_run_only_if_its_help_says_so(
    settings: Settings, cluster: Cluster, verb: verbs.Verb, default: str
):
    with pytest.raises(Problem) as caught:
        verb.do(settings, fields.parse(verb.options, {}), print)
    assert ("there is no run in" in str(caught.value)) == (default == "the newest run")
