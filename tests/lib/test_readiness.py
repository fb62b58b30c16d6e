"""How charms on one machine tell each other about the needs of jobs."""

import json
import pathlib

import pytest

from slurm_ddp import mounts, readiness

UNIT = "shared-filesystem-client/0"


@pytest.fixture(autouse=True)
def machine(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    monkeypatch.setattr(readiness, "DIRECTORY", tmp_path / "needs")
    monkeypatch.setattr(readiness, "BOOT_ID", tmp_path / "boot_id")
    monkeypatch.setattr(mounts, "MOUNTINFO", tmp_path / "mountinfo")
    (tmp_path / "mountinfo").write_text(
        "42 1 0:40 / /mnt/shared rw,nosuid,nodev shared:1 - fuse.juicefs JuiceFS:ddp rw\n"
    )
    boot(tmp_path, "first")
    return tmp_path


def boot(machine: pathlib.Path, name: str) -> None:
    (machine / "boot_id").write_text(f"{name}\n")


def test_where_nobody_needs_anything_nothing_is_missing():
    assert (readiness.missing(), readiness.withdraw(UNIT)) == ([], False)


def test_a_contribution_that_did_not_work_is_missing():
    assert readiness.tell(UNIT, ready=False, detail="waiting for redis")
    assert readiness.missing() == [f"{UNIT} (waiting for redis)"]
    assert readiness.tell(UNIT, ready=False)
    assert readiness.missing() == [UNIT]


def test_a_working_contribution_is_written_once():
    readiness.tell(UNIT, ready=False, detail="not yet")
    assert readiness.tell(UNIT, ready=True, mountpoint="/mnt/shared", detail="mounted")
    assert not readiness.tell(UNIT, ready=True, mountpoint="/mnt/shared", detail="mounted")
    assert readiness.missing() == []


def test_after_a_reboot_it_has_to_be_seen_again(machine: pathlib.Path):
    readiness.tell(UNIT, ready=True, mountpoint="/mnt/shared")
    boot(machine, "second")
    assert readiness.missing() == [f"{UNIT} (not checked since this boot)"]
    readiness.tell(UNIT, ready=True, mountpoint="/mnt/shared")
    assert readiness.missing() == []


def test_a_mount_that_was_removed_is_missing_though_its_charm_saw_it(machine: pathlib.Path):
    readiness.tell(UNIT, ready=True, mountpoint="/mnt/shared")
    (machine / "mountinfo").write_text("")
    assert readiness.missing() == [f"{UNIT} (nothing is mounted at /mnt/shared)"]


def test_each_unit_is_waited_for_until_it_withdraws():
    readiness.tell(UNIT, ready=True)
    readiness.tell("scratch/3", ready=False)
    assert readiness.missing() == ["scratch/3"]
    assert readiness.withdraw("scratch/3")
    assert readiness.missing() == []


def test_a_newer_charm_may_write_more_and_invalid_files_keep_jobs_away(machine: pathlib.Path):
    readiness.tell(UNIT, ready=True)
    path = machine / "needs/shared-filesystem-client-0.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"since": 3}))
    assert readiness.missing() == []
    path.write_text("{")
    assert readiness.missing() == ["shared-filesystem-client-0 (its file cannot be read)"]
