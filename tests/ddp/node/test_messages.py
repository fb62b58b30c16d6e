"""Each line of another program that is known has its source, and an example with its verdict."""

import pathlib
import re
import signal

import pytest
import yaml

from ddp.node.diagnosis import messages, rank_ends

_VERDICTS = yaml.safe_load(pathlib.Path(__file__).with_name("test_verdicts.yaml").read_text())
_TEXTS = re.compile("<[A-Z]+>")  # stand before a line, or are the whole
EXAMPLES = [
    *(_TEXTS.sub("", printed) for printed, *_ in _VERDICTS["verdicts"]),
    "torch.distributed.DistBackendError: NCCL error in: NCCLUtils.cpp:94, unhandled system error",
    rank_ends.describe(-signal.SIGBUS, None),
    rank_ends.describe(-signal.SIGKILL, ""),
]


@pytest.mark.parametrize(
    "fault", [*messages.MACHINE_FAULTS, *messages.PROGRAM_FAULTS], ids=lambda fault: fault.source
)
def test_each_fault_has_its_source_and_an_example(
    fault: messages.MachineFault | messages.ProgramFault,
):
    assert fault.source
    assert any(re.match(fault.pattern, line) for line in EXAMPLES)


def test_each_fault_of_a_program_has_a_remedy():
    assert all(fault.remedy for fault in messages.PROGRAM_FAULTS)
