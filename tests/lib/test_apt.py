"""What apt says, read right: texts as apt-cache and apt-get of Debian 12 print them."""

import pytest

from slurm_ddp import apt
from slurm_ddp.run import CommandError, Completed

SHOW = """\
Package: nvidia-open-kernel-dkms
Source: nvidia-open-gpu-kernel-modules
Version: 535.261.03-1
Installed-Size: 12
Depends: firmware-nvidia-gsp (= 535.261.03) | firmware-nvidia-gsp-535.261.03, nvidia-open-kernel-support--v1
Pre-Depends: nvidia-installer-cleanup
Description-en: NVIDIA open kernel module DKMS source
 Package: not-a-package
 .

Package: nvidia-smi
Version: 535.309.01-0+deb12u1
Depends: libnvidia-ml1 (= 535.309.01-0+deb12u1)

Package: nvidia-smi
Version: 535.261.03-1

"""
UNMET = """\
Reading package lists...
The following packages have unmet dependencies:
 nvidia-open-kernel-dkms : Depends: firmware-nvidia-gsp (= 535.261.03) or
                                    firmware-nvidia-gsp-535.261.03
E: Unable to correct problems, you have held broken packages.
"""


class Apt:
    """Answers with prepared texts, and keeps what was asked."""

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


def test_versions(monkeypatch: pytest.MonkeyPatch):
    Apt(monkeypatch, Completed(0, SHOW, ""))
    found = apt.versions(["nvidia-smi", "nvidia-open-kernel-dkms", "no-such-package"])
    assert [offer.number for offer in found["nvidia-smi"]] == ["535.309.01-0+deb12u1", "535.261.03-1"]
    assert found["nvidia-smi"][0].upstream == "535.309.01"
    assert found["nvidia-open-kernel-dkms"][0].depends == (
        ("nvidia-installer-cleanup",),
        ("firmware-nvidia-gsp (= 535.261.03)", "firmware-nvidia-gsp-535.261.03"),
        ("nvidia-open-kernel-support--v1",),
    )
    assert "no-such-package" not in found
    assert "not-a-package" not in found


def test_nothing_is_asked_for_nothing(monkeypatch: pytest.MonkeyPatch):
    asked = Apt(monkeypatch)
    assert apt.versions([]) == {}
    assert asked.asked == []


@pytest.mark.parametrize(
    ("number", "upstream"),
    [
        ("1:580.173.02-0ubuntu0.24.04.1", "580.173.02"),
        ("580.1", "580.1"),
        ("12.0.140~12.0.1-4build4", "12.0.140~12.0.1"),
    ],
)
def test_upstream(number: str, upstream: str):
    assert apt.upstream(number) == upstream


def test_what_an_exact_set_takes_away(monkeypatch: pytest.MonkeyPatch):
    asked = Apt(monkeypatch, Completed(0, "Remv slurmd [22.05]\nInst a [1] (2 x)\nRemv b [1]\n", ""))
    assert apt.removed_by({"b": "2", "a": "1"}) == ("b", "slurmd")
    assert asked.asked[0][-4:] == ["--allow-change-held-packages", "install", "a=1", "b=2"]
    assert "--simulate" in asked.asked[0]


def test_unmet_dependencies_are_told_in_one_line(monkeypatch: pytest.MonkeyPatch):
    Apt(monkeypatch, CommandError("apt-get exited 100", returncode=100, stdout=UNMET, stderr="E: Unable"))
    with pytest.raises(
        apt.AptError, match=r"^nvidia-open-kernel-dkms : Depends: firmware-nvidia-gsp \(= 535.261.03\) or$"
    ):
        apt.removed_by({"nvidia-open-kernel-dkms": "535.261.03-1"})


def test_holds(monkeypatch: pytest.MonkeyPatch):
    held = Completed(0, "a\nb\n", "")
    asked = Apt(monkeypatch, held, held, Completed(0, "", ""), held, Completed(0, "", ""), held)
    assert not apt.ensure_held(["a"])
    assert apt.ensure_held(["a", "c"])
    assert asked.asked[-1] == ["/usr/bin/apt-mark", "hold", "c"]
    assert apt.ensure_not_held(["a", "z"])
    assert asked.asked[-1] == ["/usr/bin/apt-mark", "unhold", "a"]
    assert not apt.ensure_not_held(["z"])


def test_installed(monkeypatch: pytest.MonkeyPatch):
    Apt(
        monkeypatch, Completed(1, "installed a 1:2-3\nconfig-files b 1\nunpacked c 4\n", "no packages found matching z")
    )
    assert apt.installed("a", "b", "c", "z") == {"a": "1:2-3"}
