"""What apt says, read right; tests of slurm-gpu resolve drivers with the real one."""

import pathlib
import subprocess
import threading

import pytest
import yaml

from slurm_ddp import apt
from slurm_ddp.commands import CommandError, Completed

CASES = yaml.safe_load(pathlib.Path(__file__).with_suffix(".yaml").read_text())

HOLD = "import fcntl, sys; f = open(sys.argv[1], 'w'); fcntl.lockf(f, 2); print('.', end='', flush=True); sys.stdin.read()"
UNMET: str = CASES["printed"]["UNMET"]


class Apt:
    """Answers with prepared texts, and keeps the questions."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *answers: Completed | CommandError) -> None:
        self.asked: list[list[str]] = []
        self._answers = list(answers)
        monkeypatch.setattr(apt, "run", self.run)

    def run(self, *argv: str, **_: object) -> Completed:
        self.asked.append(list(argv))
        answer = self._answers.pop(0)
        if isinstance(answer, CommandError):
            raise answer
        return answer


@pytest.mark.parametrize(("number", "upstream"), CASES["upstream"])
def test_upstream(number: str, upstream: str):
    assert apt.upstream(number) == upstream


def test_apt_waits_for_another_process_that_holds_the_lock_of_its_lists(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "partial").mkdir()
    settings = {
        "Dir::State::lists": tmp_path,
        "Dir::Etc::sourcelist": "/dev/null",
        "Dir::Etc::sourceparts": "/dev/null",
    }
    own = [word for key, value in settings.items() for word in ("-o", f"{key}={value}")]
    monkeypatch.setattr(apt, "_APT_GET", ("/usr/bin/apt-get", *own))
    monkeypatch.setattr(apt, "_LOCK_POLL_S", 0.1)
    with subprocess.Popen(
        ["/usr/bin/python3", "-c", HOLD, tmp_path / "lock"], stdin=-1, stdout=-1
    ) as holder:
        assert holder.stdin is not None and holder.stdout is not None
        assert holder.stdout.read(1) == b"."
        monkeypatch.setattr(apt, "_LOCK_S", 0)
        with pytest.raises(CommandError, match="lock"):
            apt.update()
        monkeypatch.setattr(apt, "_LOCK_S", 60)
        threading.Timer(0.5, holder.stdin.close).start()
        apt.update()


def test_pins_are_a_file_for_one_command(monkeypatch: pytest.MonkeyPatch):
    pins: list[tuple[pathlib.Path, str]] = []

    def read(*argv: str, **_: object) -> Completed:
        path = pathlib.Path(argv[argv.index("-o", 4) + 1].removeprefix("Dir::Etc::Preferences="))
        pins.append((path, path.read_text()))
        return Completed(0, "", "")

    monkeypatch.setattr(apt, "run", read)
    apt.simulate(["a"], {"*nvidia* libcuda1": "535.261.03-*"})
    assert (
        pins[0][1]
        == "Package: *nvidia* libcuda1\nPin: version 535.261.03-*\nPin-Priority: 1001\n\n"
    )
    assert not pins[0][0].exists()


def test_unmet_dependencies_are_reported_in_one_line(monkeypatch: pytest.MonkeyPatch):
    Apt(
        monkeypatch,
        CommandError("apt-get exited 100", returncode=100, stdout=UNMET, stderr="E: Unable"),
    )
    with pytest.raises(
        apt.AptError,
        match=r"^nvidia-open-kernel-dkms : Depends: firmware-nvidia-gsp \(= 535.261.03\) or$",
    ):
        apt.simulate(["nvidia-open-kernel-dkms"])


def test_holds(monkeypatch: pytest.MonkeyPatch):
    held = Completed(0, "a\nb\n", "")
    asked = Apt(monkeypatch, held, held, Completed(0, "", ""), held, Completed(0, "", ""), held)
    apt.ensure_held(["a"])
    apt.ensure_held(["a", "c"])
    assert asked.asked[-1] == ["/usr/bin/apt-mark", "hold", "c"]
    apt.ensure_not_held(["a", "z"])
    assert asked.asked[-1] == ["/usr/bin/apt-mark", "unhold", "a"]
    apt.ensure_not_held(["z"])
    assert asked.asked[-1] == ["/usr/bin/apt-mark", "showhold"]


def test_installed(monkeypatch: pytest.MonkeyPatch):
    Apt(
        monkeypatch,
        Completed(
            1, "installed a 1:2-3\nconfig-files b 1\nunpacked c 4\n", "no packages found matching z"
        ),
    )
    assert apt.installed("a", "b", "c", "z") == {"a": "1:2-3"}


def test_holds_that_cannot_be_read_are_not_taken_for_none(monkeypatch: pytest.MonkeyPatch):
    def fails(*argv: str, check: bool = True, **_: object) -> Completed:
        if check:
            raise CommandError("apt-mark exited 100")
        return Completed(100, "", "")

    monkeypatch.setattr(apt, "run", fails)
    with pytest.raises(CommandError):
        apt.ensure_not_held(["nvidia-utils-580-server"])
