"""The facts of a healthy cluster of two nodes."""

import pathlib
import sys

import pytest

sys.path.append(str(pathlib.Path(__file__).parents[1]))
from actions.conftest import *  # noqa: F403 - the program asked as the charm asks it
from node_reports import NAMES, healthy

from ddp.doctor.facts import Facts
from ddp.slurm import access, jobs


@pytest.fixture
def facts(settings: object) -> Facts:
    nodes = tuple(jobs.Capacity(name, 2, 16000, 0, "IDLE", is_usable=True) for name in NAMES)
    return Facts(
        partition=jobs.Partition("slurmd", True, True, None, None, nodes),
        asked=NAMES,
        left_out={},
        reports={name: healthy(name) for name in NAMES},
        trouble="",
        config={
            "KillWait": "30 sec",
            "SLURM_VERSION": "24.11.5",
            "AccountingStorageType": "accounting_storage/slurmdbd",
        },
        manifests=(),
        damaged=(),
        login=("fuse.juicefs", "JuiceFS:shared"),
        accounting=access.Accounting(("physics",), ("normal",), (), frozenset()),
    )
