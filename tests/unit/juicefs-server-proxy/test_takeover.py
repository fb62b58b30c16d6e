"""A volume in an application's old storage: taken over whole, or refused; even if a hook dies."""

import dataclasses
import json
import pathlib
import typing

import pytest
from doubles import UUID, Killed
from ops import testing
from rig import Rig, clients, peers

import embedded.store
import embedded.takeover
from slurm_ddp import juicefs
from slurm_ddp.commands import CommandError
from slurm_ddp.interfaces import filesystem_info as fs

URL = "redis://192.0.2.0:6379/1"  # at Scenario's default network
MARKER = "juicefs-server-proxy"
STEPS = ("dump", "renew", "config", "trial")


def storage(rig: Rig) -> pathlib.Path:
    return typing.cast("typing.Any", rig.ctx)._get_storage_root("volume", 0)


def deploy(rig: Rig, **config: str) -> testing.State:
    return rig.ctx.run(rig.ctx.on.start(), rig.state(peers(), *clients("one"), config=config))


def remove(rig: Rig, application: str | None = None) -> None:
    """Remove the application; its storage stays, as if it had belonged to `application`."""
    rig.ctx.run(rig.ctx.on.remove(), rig.state())
    rig.world.commands.clear()
    if application is not None:
        kept = json.loads((storage(rig) / MARKER).read_text())
        (storage(rig) / MARKER).write_text(json.dumps(kept | {"application": application}))


def offered(out: testing.State) -> str | None:
    return out.get_relation(10).local_app_data.get("endpoint")


def key(rig: Rig) -> str:
    assert rig.servers.running is not None
    return fs.reveal(rig.servers.running.credentials.secret_key)


def taken_over(rig: Rig, out: testing.State) -> None:
    """Check that the volume is whole, opens with the present keys, is offered, and is ours."""
    assert isinstance(out.unit_status, testing.ActiveStatus), out.unit_status
    assert rig.world.keys[URL] == key(rig)
    assert f"uuid={UUID}" in (offered(out) or "")
    assert len(rig.world.formats) == 1, "it was formatted again"
    owner = embedded.takeover.owner(storage(rig))
    assert owner is not None
    assert (owner.application, owner.uuid) == ("juicefs-server-proxy", UUID)
    assert key(rig) not in (storage(rig) / MARKER).read_text()


def commands(rig: Rig) -> list[str]:
    return [command[0] for command in rig.world.commands]


def test_an_application_of_the_same_name_takes_its_volume_over_without_a_question(rig: Rig):
    first = deploy(rig)
    taken_over(rig, first)
    assert rig.world.trials == []
    before = key(rig)
    remove(rig)
    out = deploy(rig)
    taken_over(rig, out)
    assert key(rig) != before
    assert commands(rig) == ["dump", "config"], "the backup comes first"
    assert "--encrypt-secret" in rig.world.commands[-1]
    assert rig.world.trials == ["shared"]
    again = rig.ctx.run(rig.ctx.on.update_status(), out)
    taken_over(rig, again)
    assert commands(rig) == ["dump", "config"]
    assert rig.world.trials == ["shared"]


def test_the_capacity_counts_a_taken_over_volumes_content_from_the_first_hook(rig: Rig):
    deploy(rig)
    remove(rig)
    rig.world.volumes[URL] = dataclasses.replace(rig.world.volumes[URL], used_bytes=20 << 30)
    rig.servers.disk = embedded.store.Usage(22 << 30, 10 << 30)
    taken_over(rig, deploy(rig))
    assert rig.world.volumes[URL].capacity_gib == 28


def test_an_application_of_another_name_is_asked_for_the_uuid(rig: Rig):
    deploy(rig)
    remove(rig, "another")
    asked = deploy(rig)
    assert isinstance(asked.unit_status, testing.BlockedStatus)
    assert f"adopt={UUID}" in asked.unit_status.message
    assert offered(asked) is None
    assert commands(rig) == []
    out = rig.ctx.run(
        rig.ctx.on.config_changed(), dataclasses.replace(asked, config={"adopt": UUID})
    )
    taken_over(rig, out)
    assert commands(rig) == ["dump", "config"]


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("application", [None, "another"])
def test_a_takeover_that_is_killed_begins_again(rig: Rig, step: str, application: str | None):
    deploy(rig)
    remove(rig, application)
    rig.world.dies_at = step
    with pytest.raises(Killed):
        deploy(rig, adopt=UUID)
    assert rig.world.dies_at == ""
    out = deploy(rig, adopt=UUID)  # the hook's writes to Juju are lost
    taken_over(rig, out)
    assert rig.world.trials[-1:] == ["shared"]


def test_a_volume_whose_owner_was_not_noted_is_kept_as_it_is_where_it_opens(rig: Rig):
    out = deploy(rig)
    (storage(rig) / MARKER).write_text("")  # as a release before this one left it
    out = rig.ctx.run(rig.ctx.on.upgrade_charm(), out)
    taken_over(rig, out)
    assert commands(rig) == ["format"]


def test_a_volume_that_was_adopted_with_the_former_keys_is_repaired(rig: Rig):
    out = deploy(rig)
    (storage(rig) / MARKER).write_text("")
    rig.world.keys[URL] = "the former application's"
    out = rig.ctx.run(rig.ctx.on.upgrade_charm(), out)
    taken_over(rig, out)
    assert commands(rig) == ["format", "dump", "config"]


@pytest.mark.parametrize("found", ["11111111-0000-0000-0000-000000000000", ""])
def test_storage_without_the_volumes_data_is_refused(rig: Rig, found: str):
    deploy(rig)
    remove(rig)
    (storage(rig) / "objects/data/shared/juicefs_uuid").write_text(found)
    out = deploy(rig)
    assert isinstance(out.unit_status, testing.BlockedStatus)
    assert out.unit_status.message.startswith("attach all of the storage")
    assert offered(out) is None
    assert commands(rig) == []


def test_storage_whose_metadata_is_lost_is_not_formatted(rig: Rig):
    deploy(rig)
    remove(rig)
    rig.world.volumes.clear()
    out = deploy(rig)
    assert isinstance(out.unit_status, testing.BlockedStatus)
    assert (
        f"restore a copy of the storage: the metadata engine lost volume shared ({UUID})"
        in out.unit_status.message
    )
    assert len(rig.world.formats) == 1


@pytest.mark.cut
def test_without_a_backup_nothing_is_changed(rig: Rig):
    deploy(rig)
    remove(rig)
    rig.world.answers["dump"] = CommandError(
        "juicefs exited 1", stderr="<FATAL>: no space left on device"
    )
    out = deploy(rig)
    assert isinstance(out.unit_status, testing.BlockedStatus)
    assert "no space left on device" in out.unit_status.message
    assert commands(rig) == ["dump"]
    assert offered(out) is None


def test_a_failed_trial_is_the_status_and_nothing_is_offered(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
):
    deploy(rig)
    remove(rig)

    def fail(volume: object) -> None:
        raise juicefs.JuicefsError("no client can mount it: it is a trial")

    with monkeypatch.context() as patched:
        patched.setattr(embedded.takeover.trial, "check", fail)
        out = deploy(rig)
    assert out.unit_status == testing.BlockedStatus("no client can mount it: it is a trial")
    assert offered(out) is None
    taken_over(rig, rig.ctx.run(rig.ctx.on.update_status(), out))


def test_a_server_whose_data_is_out_of_reach_is_not_active(rig: Rig):
    out = deploy(rig)
    rig.world.keys[URL] = "another"
    out = rig.ctx.run(rig.ctx.on.update_status(), out)
    assert isinstance(out.unit_status, testing.BlockedStatus)
    assert "handshake failed" in out.unit_status.message


@pytest.mark.parametrize("content", ["", "{", "[]", "null", '{"application": "x"}', "\x80"])
def test_a_note_that_is_not_whole_names_no_owner(tmp_path: pathlib.Path, content: str):
    (tmp_path / MARKER).write_text(content, encoding="latin-1")
    assert embedded.takeover.owner(tmp_path) is None
