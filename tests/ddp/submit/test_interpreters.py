"""The Python of a user's own virtual or conda environment, on the shared filesystem."""

import dataclasses
import json
import pathlib
import stat
import tempfile

import hypothesis
import pytest
from cluster import Cluster
from command_line import typed
from hypothesis import strategies as st
from test_ranks import run_node
from trainer_fixtures import cluster

from batch_host import Node
from ddp import cli, readiness
from ddp.base import ParameterError, Settings
from ddp.options import fields, models
from ddp.submit import interpreters

__all__ = ["cluster"]
KINDS = ("venv", "conda", "system")


def make(place: pathlib.Path, kind: str = "venv", torch: str | None = "2.6.0+cu124", agent: str = "") -> pathlib.Path:
    """Make what venv or conda makes, of which only the interpreter runs; `system` takes in another one's packages."""
    (place / "bin").mkdir(parents=True)
    python = place / "bin" / "python"
    (place / "bin" / "python3").write_text(f"#!/bin/bash\n{agent}\n")
    (place / "bin" / "python3").chmod(stat.S_IRWXU)
    python.symlink_to("python3")
    (place / "conda-meta").mkdir() if kind == "conda" else (place / "pyvenv.cfg").touch()
    if kind == "system":
        make(place / "base", torch=torch)
        text = f"home = {place}/base/bin\ninclude-system-site-packages = true\n"
        (place / "pyvenv.cfg").write_text(text)
    elif torch is not None:
        version = place / "lib" / "python3.12" / "site-packages" / "torch" / "version.py"
        version.parent.mkdir(parents=True)
        version.write_text(f"from typing import Optional\n\n__version__ = '{torch}'\ncuda: Optional[str] = None\n")
    return python


@pytest.fixture
def folder(settings: Settings, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> pathlib.Path:
    """The user's project, with one environment active."""
    monkeypatch.setattr(cli, "settings_of", lambda _: dataclasses.replace(settings, takes_any_script=True))
    monkeypatch.setattr(readiness, "require", lambda *_, **__: None)
    (tmp_path / "proj").mkdir()
    (tmp_path / "proj" / "train.py").touch()
    monkeypatch.chdir(tmp_path / "proj")
    monkeypatch.setenv("VIRTUAL_ENV", str(tmp_path / "venv"))
    return tmp_path / "proj"


versions = st.from_regex(r"[1-9]\.[0-9]{1,2}\.[0-9](\+(cpu|cu[0-9]{3})|a0\+git[0-9a-f]{7})?", fullmatch=True)


@hypothesis.settings(deadline=None, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture])
@hypothesis.given(st.sampled_from(KINDS), st.none() | versions, st.booleans(), st.booleans())
def test_an_environment_is_taken_by_its_torch(
    settings: Settings, kind: str, torch: str | None, is_active: bool, is_folder: bool
):
    with tempfile.TemporaryDirectory(dir=settings.workspace) as name:
        python = make(pathlib.Path(name) / "env", kind, torch)
        given = str(python.parents[1] if is_folder or is_active else python)
        params = fields.parse(models.SubmitDdp, {"workload": "/x.py"} | ({} if is_active else {"python": given}))
        params = params.model_copy(update={"active": given if is_active else ""})
        if torch is None and not is_active:
            with pytest.raises(ParameterError, match=f"^python: {given} has no torch; "):
                interpreters.choose(settings, params)
            return
        chosen, version, remark = interpreters.choose(settings, params)
        assert (chosen, version) == (("", "") if torch is None else (str(python), torch))
        assert (f"{given} is not used, since it has no torch" if torch is None else f"torch {torch}") in remark


def test_a_job_runs_the_active_python_in_place_and_no_environment_is_made(
    settings: Settings, cluster: Cluster, folder: pathlib.Path
):
    python = make(folder.parent / "venv")
    code, _, err = typed("submit", "--run", "night", "-N", "1", "train.py")
    assert code == 0, err
    assert f"python: {python}, torch 2.6.0+cu124, of the active environment" in err
    job = cluster.jobs[-1].training()
    assert (job.environment, job.python) == (None, str(python))
    assert (pathlib.Path(job.payload) / "ddptrain" / "__init__.py").is_file()
    record = json.loads((settings.runs / "night" / "job.json").read_text())
    assert (record["python"], record["torch"], record["environment"]) == (str(python), "2.6.0+cu124", None)
    assert not list(settings.environments.glob("*.json"))
    for words in ("../venv", "../venv/bin/python"):  # the link stays, or it would be the host's own
        out = typed("submit", "--dry-run", "--json", "--python", words, "train.py")[1]
        assert json.loads(out)["environment"] == str(python)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("--python none train.py", "not installed yet"),
        ("gpt", "not installed yet"),
        ("--container-image x:1 train.py", "the container x:1"),
        ("--python ../absent train.py", "absent does not exist, or has no Python that you can"),
        ("--python ../venv -e mine train.py", "--python: mine brings its own; give only one of python, environment"),
        ("render --kubernetes --container-image x:1 --python ../venv train.py", "--python: pods have the image's own"),
    ],
)
def test_another_choice_counts(settings: Settings, cluster: Cluster, folder: pathlib.Path, words: str, text: str):
    make(folder.parent / "venv")
    verb = () if words.startswith("render") else ("submit", "--dry-run")
    assert text in "".join(map(str, typed(*verb, *words.split())[1:]))


def test_an_environment_of_this_host_alone_is_named(
    settings: Settings, cluster: Cluster, folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    with tempfile.TemporaryDirectory(dir="/dev/shm") as own:  # noqa: S108 - another filesystem
        python = make(pathlib.Path(own) / "env")
        monkeypatch.setenv("VIRTUAL_ENV", f"{own}/env")
        out = typed("submit", "--dry-run", "train.py")[1]
        assert f"the active environment {own}/env is not used, since it is not on the shared filesystem; " in out
        out = typed("submit", "--dry-run", "--python", str(python), "train.py")[1]
        assert f"{python}, torch 2.6.0+cu124, which each node needs at this path" in out


def test_on_a_node_it_is_as_if_active_and_one_that_is_missing_is_named(settings: Settings, node: Node):
    place = settings.workspace / "venv"
    python = make(place, agent='echo "$VIRTUAL_ENV ${PATH%%:*} ${PYTHONPATH##*:} $PY"')
    process = run_node(settings, node, "", given={"python": str(python), "outcome": False}, PYTHONPATH="/a:/b")
    output = process.communicate(timeout=30)[0]
    assert output.splitlines()[-1] == f"{place} {place}/bin /b {python}"
    (place / "bin" / "python3").unlink()
    output = run_node(settings, node, "", given={"python": str(python)}).communicate(timeout=30)[0]
    line = f"[FATAL] slurmd-0: {python} cannot be started (No such file or directory); every node needs this path, "
    assert line in output
