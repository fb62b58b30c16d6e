import pytest

from slurm_ddp import juicefs
from slurm_ddp.charm import Level, Status, StatusError
from slurm_ddp.run import CommandError


class Later(Exception):
    pass


class Mine(Exception):
    pass


def wait(error: Exception) -> str:
    return f"engine: {error}"


@pytest.mark.parametrize(
    ("raised", "text", "passes"),
    [
        (juicefs.UnreachableError("10.0.0.5:6379 does not answer"), "engine: 10.0.0.5:6379 does not answer", True),
        (Later("the lock is held"), "engine: the lock is held", True),
        (juicefs.JuicefsError("the metadata engine refuses"), "the metadata engine refuses", False),
        (
            juicefs.DownloadError("no download"),
            "no download: attach it: juju attach-resource app juicefs=FILE",
            False,
        ),
        (
            juicefs.OldProgramError("juicefs 1.0.4 is too old: attach 1.3 or newer"),
            "juicefs 1.0.4 is too old: attach 1.3 or newer: juju attach-resource app juicefs=FILE",
            False,
        ),
        (CommandError("systemctl exited 1"), "systemctl exited 1", False),
        (Mine("storage-type: lies in s3"), "storage-type: lies in s3", False),
    ],
)
def test_what_fails_is_explained(raised: Exception, text: str, passes: bool):
    with pytest.raises(StatusError) as caught, juicefs.explained("app", wait, passing=(Later,), lasting=(Mine,)):
        raise raised
    assert caught.value.status == Status(Level.WAITING if passes else Level.BLOCKED, text)
    assert caught.value.retry is passes
    assert caught.value.__cause__ is raised


def test_what_nobody_named_is_a_mistake_of_ours():
    with pytest.raises(Mine), juicefs.explained("app", wait):
        raise Mine("x")
