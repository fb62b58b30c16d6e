"""The Python of a user's own virtual or conda environment, on the shared filesystem."""

import json
import pathlib
import tempfile

import hypothesis
import pytest
from cluster import Cluster
from command_line import typed
from environments import make
from hypothesis import strategies as st
from test_start import _alone, folder, started

from ddp.base import ParameterError, Settings
from ddp.options import fields, models
from ddp.submit import pythons

__all__ = ["_alone", "folder"]
VERSIONS = st.from_regex(r"[1-9]\.[0-9]{1,2}\.[0-9](\+(cpu|cu[0-9]{3})|a0\+git[0-9a-f]{7})?", fullmatch=True)


@hypothesis.settings(deadline=None, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture])
@hypothesis.given(st.sampled_from(["venv", "conda", "system"]), st.none() | VERSIONS, st.booleans(), st.booleans())
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
                pythons.choose(settings, params)
            return
        chosen, remark = pythons.choose(settings, params)
        assert chosen == ("" if torch is None else str(python))
        assert (f"{given} is not used, since it has no torch" if torch is None else f"torch {torch}") in remark


def test_a_job_runs_the_active_python_in_place_and_no_environment_is_made(
    settings: Settings, cluster: Cluster, folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    python = make(folder.parent / "venv")
    monkeypatch.setenv("VIRTUAL_ENV", str(folder.parent / "venv"))
    assert f"python: {python}, torch 2.6.0, of the active environment" in typed("submit", "-N", "1", "train.py")[2]
    job = started(settings, cluster, "train.py")
    assert (job.environment, job.python) == (None, str(python))
    assert dict(job.variables)["VIRTUAL_ENV"] == str(folder.parent / "venv"), "as sbatch passes it on"
    assert (pathlib.Path(job.payload) / "ddptrain" / "__init__.py").is_file()
    record = json.loads((settings.runs / "night" / "job.json").read_text())
    assert (record["python"], record["environment"]) == (str(python), None)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as own:
        alone = make(pathlib.Path(own) / "env")
        for words, text in {
            "--python ../venv": f"environment  {python}\n",
            "--python ../venv/bin/python": f"environment  {python}\n",  # not the host's, to which it links
            "--python none": "environment  not installed yet",
            "--container-image x:1": "environment  the container x:1",
            "--python ../absent": "absent does not exist, or has no Python that you can execute",
            "--python ../venv -e mine": "--python: mine brings its own; give one of python, environment",
            f"--python {alone}": f"python: {alone}, torch 2.6.0, which each node needs at this path",
        }.items():
            assert text in "".join(map(str, typed("submit", "--dry-run", *words.split(), "train.py")[1:]))
        monkeypatch.setenv("VIRTUAL_ENV", f"{own}/env")
        unused = f"the active environment {own}/env is not used, since it is not on the shared filesystem; "
        assert unused in typed("submit", "--dry-run", "train.py")[1]
    err = typed("render", "--kubernetes", "--container-image", "x:1", "--python", str(python), "train.py")[2]
    assert "--python: pods have the image's own" in err
