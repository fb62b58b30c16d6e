"""slurmctld forgets orders between the last save of its state and its successor's start."""

import copy
import pathlib

import pytest
import roles
from conftest import OPTIONS, WITH_GPU
from slurm_double import Record, SlurmDouble

from node import registration, slurmd_options
from slurm_ddp import systemd
from slurm_ddp.commands import Completed
from slurm_ddp.slurm import nodes


@pytest.mark.parametrize("after", range(4))  # so many orders the state was saved
@pytest.mark.parametrize("options", [OPTIONS, WITH_GPU.replace("gpu:1", "gpu:2")])
def test_what_slurmctld_forgot_while_it_was_reconfigured_is_ordered_again(
    slurm: SlurmDouble, monkeypatch: pytest.MonkeyPatch, options: str, after: int
):
    slurmd_options.PATH.write_text(options)
    slurm.devices = 2
    slurm.register()
    slurm.devices = 1
    slurm.log.clear()
    saved = [copy.deepcopy(slurm.record)]

    def run(*argv: str | pathlib.Path, **more: float | bool) -> Completed:
        given = len(slurm.log)
        answer = slurm.run(*argv, **more)  # pyright: ignore[reportArgumentType]
        if len(slurm.log) > given:
            saved.append(copy.deepcopy(slurm.record))
        return answer

    def sleep(seconds: float) -> None:
        if seconds == registration._HANDOVER_S and not successors:
            successors.append(slurm)
            slurm.record = saved[after]
            slurm.register()  # as every slurmd does with a slurmctld that starts

    successors: list[SlurmDouble] = []
    for module in (nodes, systemd):
        monkeypatch.setattr(module, "run", run)
    monkeypatch.setattr(registration.time, "sleep", sleep)
    roles.advance()
    assert successors
    assert (slurm.record, slurm.state()) == (Record("gpu:mock_gpu:1"), "IDLE+DYNAMIC_NORM")
    roles.assert_no_journal()
