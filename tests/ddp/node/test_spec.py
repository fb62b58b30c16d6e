"""job.json: what a job is to do, written at submission and read strictly in the job."""

import json
import pathlib
import typing

import pytest
from job_specs import make

from ddp.node import spec


def test_what_was_written_is_read(tmp_path: pathlib.Path):
    whole = make(
        tmp_path / "runs" / "first",
        command=(spec.Word("RUN_DIR", is_variable=True), spec.Word("$(id) '\" \n")),
        container=spec.Container("x:1", "/p", "A,B"),
        fabrics=(spec.Fabric("tcp", (("A", "1"),), "", ("/x",), (), "", "", "", (), ()),),
    )
    path = tmp_path / "job.json"
    path.write_text(spec.dump(whole))
    assert spec.load(spec.JobSpec, str(path)) == whole


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"more": 1}, "unknown or missing: more"),
        ({"run": None}, "run must be of type str"),
        ({"max_restarts": "3"}, "max_restarts must be of type int"),
        ({"max_restarts": True}, "max_restarts must be of type int"),
        ({"is_sweep": 0}, "is_sweep must be of type bool"),
        ({"command": "x"}, "command must be a list"),
        ({"command": [{"text": "x"}]}, r"command\[0\]: unknown or missing: is_variable"),
        ({"variables": [["A"]]}, r"variables\[0\] must have 2 items"),
        ({"environment": 3}, "environment must be an object"),
    ],
)
def test_what_is_not_a_specification_is_refused_by_name(
    tmp_path: pathlib.Path, change: dict[str, typing.Any], words: str
):
    path = tmp_path / "job.json"
    given = json.loads(spec.dump(make(tmp_path / "runs" / "first")))
    path.write_text(json.dumps(given | change))
    with pytest.raises(spec.SpecError, match=words):
        spec.load(spec.JobSpec, str(path))
    path.write_text("{")
    with pytest.raises(spec.SpecError, match="is not JSON"):
        spec.load(spec.JobSpec, str(path))
