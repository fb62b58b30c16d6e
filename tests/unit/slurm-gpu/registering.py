"""A node on its way to its registration, by the state machine alone."""

from slurm_double import Record

from node import journals, registration, slurmd_options, slurmd_unit
from node.registration import Progress

GRES = "gpu:mock_gpu:1"


def advance(*, lines_live: bool = True, gres: str | None = GRES) -> Progress:
    options = slurmd_options.read()
    assert options is not None
    return registration.advance(
        registration.Target("slurmd-0", gres, options, lines_live=lines_live)
    )


def leave() -> None:
    options = slurmd_options.read()
    assert options is not None
    registration.leave(registration.Target("slurmd-0", None, options))


def drained(reason: str, gres: str = GRES) -> Record:
    return Record(gres, flags={"DYNAMIC_NORM", "DRAIN"}, reason=reason)


def assert_no_journal() -> None:
    assert journals.NodeSnapshot.load() is None and not slurmd_unit.DRAINED_ENV.exists()
