"""A volume in use moves from the JuiceFS of before to the pinned one: the charm first, its clients one by one."""

import os
import pathlib
import typing

import clients
import proxies
import pytest
import servers
from ops import testing

from scripts import fetch_juicefs
from slurm_ddp import juicefs


@pytest.fixture
def volume(
    before: pathlib.Path,
    redis: servers.Server,
    bucket: servers.Bucket,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
) -> proxies.Proxy:
    """Return a volume that the juicefs of before formatted."""
    proxies.isolated(monkeypatch, tmp_path)
    servers.redis_cli(redis, "-n", "1", "flushdb")
    config: dict[str, typing.Any] = {
        "metadata-url": f"redis://{redis.address}/1",
        "bucket": bucket.url,
        "volume-name": f"v{os.urandom(6).hex()}",  # different for each test: they share the bucket
    }
    content = {
        "meta-password": servers.PASSWORD,
        "access-key": bucket.access_key,
        "secret-key": bucket.secret_key,
    }
    made = proxies.Proxy(before, tmp_path, config, content)
    out = made.hook("config_changed")
    assert isinstance(out.unit_status, testing.ActiveStatus)
    assert out.workload_version == fetch_juicefs.BEFORE.version
    return made


def attach(volume: proxies.Proxy, program: pathlib.Path) -> None:
    """Give the charm another juicefs, as `juju attach-resource` does."""
    resource = testing.Resource(name="juicefs", path=program)
    out = volume.hook("upgrade_charm", resources={resource})
    assert isinstance(out.unit_status, testing.ActiveStatus)
    assert out.workload_version == juicefs.RELEASE


def test_the_pinned_program_is_the_release_that_the_charms_install(program: pathlib.Path):
    assert juicefs.text(juicefs.version(program)) == juicefs.RELEASE


def test_clients_of_both_versions_share_a_volume_in_use(
    volume: proxies.Proxy, before: pathlib.Path, program: pathlib.Path, tmp_path: pathlib.Path
):
    with clients.mounted(volume, tmp_path / "a", program=before) as old:
        (old / "checkpoint").write_bytes(b"weights" * 100_000)
        growing = (old / "log").open("a")
        growing.write("step 1\n")
        growing.flush()
        volume.action("backup-metadata")
        attach(volume, program)
        with clients.mounted(volume, tmp_path / "b", program=program) as new:
            assert volume.action("status")["clients"] == "2"
            assert (new / "checkpoint").read_bytes() == b"weights" * 100_000
            (new / "run").mkdir()
            (new / "run" / "metrics").write_text("loss 1\n")
            (new / "checkpoint").rename(new / "run" / "checkpoint")
            assert (old / "run" / "metrics").read_text() == "loss 1\n"
            assert (old / "run" / "checkpoint").read_bytes() == b"weights" * 100_000
            growing.write("step 2\n")
            growing.close()
            assert (new / "log").read_text() == "step 1\nstep 2\n"
            (old / "run" / "metrics").unlink()
            assert not (new / "run" / "metrics").exists()
    with clients.mounted(volume, tmp_path / "c", program=program) as moved:
        assert (moved / "run" / "checkpoint").read_bytes() == b"weights" * 100_000
    assert volume.action("fsck")["state"] == "clean"


def test_a_client_of_before_that_restarts_mounts_again(
    volume: proxies.Proxy, before: pathlib.Path, program: pathlib.Path, tmp_path: pathlib.Path
):
    attach(volume, program)
    with clients.mounted(volume, tmp_path / "a", program=program) as new:
        (new / "file").write_text("new")
    with clients.mounted(volume, tmp_path / "b", program=before) as old:
        assert (old / "file").read_text() == "new"


def test_the_backup_from_before_the_upgrade_is_restored_by_the_new_program(
    volume: proxies.Proxy,
    before: pathlib.Path,
    program: pathlib.Path,
    redis: servers.Server,
    tmp_path: pathlib.Path,
):
    with clients.mounted(volume, tmp_path / "a", program=before) as old:
        (old / "file").write_text("kept")
    backup = volume.action("backup-metadata")
    attach(volume, program)
    servers.redis_cli(redis, "-n", "1", "flushdb")
    volume.action("restore-metadata", uuid=backup["uuid"], file=backup["file"])
    with clients.mounted(volume, tmp_path / "b", program=program) as new:
        assert (new / "file").read_text() == "kept"
