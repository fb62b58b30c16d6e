"""A user with the programs and an environment for them, on the cluster of the functional lane."""

import pathlib
import typing

import pytest

from functional.conftest import Cluster, cluster, pytest_runtest_makereport
from functional.test_people import MP, Person, person

__all__ = ["cluster", "paula", "pytest_runtest_makereport"]  # fixtures and a hook
HERE = pathlib.Path(__file__).resolve().parent
ENVIRONMENT_S = 1800


@pytest.fixture(scope="session")
def paula(cluster: Cluster) -> typing.Iterator[Person]:
    """A user at the login node, with code/ as her project and the environment `programs`."""
    cluster.action("install-environment", timeout=ENVIRONMENT_S)
    with person(cluster, "paula", "2041") as one:
        one.does("mkdir -p code")
        for path in sorted((HERE / "code").iterdir()):
            one.writes(f"code/{path.name}", path.read_text())
        one.writes("requirements.txt", (HERE / "requirements.txt").read_text())
        one.does("ddp env create programs --requirements requirements.txt", timeout=ENVIRONMENT_S)
        one.does(f"cd code && ddp submit --wait -N 1 {SMALL} -e programs tiny_model.py {tiny(one)}")
        yield one


SMALL = "--gpus-per-node 0 --cpus-per-task 1 --memory 3G"


def tiny(one: Person) -> str:
    """Return the folder of the tiny model and its data."""
    return f"{MP}/users/{one.name}/tiny"
