import copy
import dataclasses
import json
import pathlib
import typing

import ops
import pytest
import yaml
from fake_mounter import Site, beside, context, offer, volume
from ops import testing

import mount_plan
from kinds import cephfs, kernel
from scripts import keeper
from slurm_ddp import juicefs, mounts, readiness, records, wake
from slurm_ddp.commands import CommandError, Completed
from slurm_ddp.interfaces import mount_info

CASES = yaml.safe_load(pathlib.Path(__file__).with_suffix(".yaml").read_text())
WHERE_TO_MOUNT = {"mountpoint": "/mnt/shared"}
CONTENT = {
    "meta-password": "topSecret1",
    "access-key": "juicefs-objects",
    "secret-key": "topSecret2",
}
WHERE = {
    "app": "shared-filesystem-client",
    "wanted_by": "shared-filesystem-client/0",
    "metrics_port": 9567,
}
MOUNTED = testing.ActiveStatus("JuiceFS:shared is mounted at /mnt/shared")


def asked(app: str = "slurmctld", **request: typing.Any) -> testing.SubordinateRelation:
    """Return the relation with a charm that asks for a mount, as upstream's library writes it."""
    values = mount_info.MountRequest(**request).model_dump() if request else {}
    data = {name: json.dumps(value) for name, value in values.items()}
    return testing.SubordinateRelation("mount", id=2, remote_app_name=app, remote_app_data=data)


def environment(plan: mount_plan.Plan) -> str:
    return plan.files[mount_plan.ETC / plan.spec.app / "environment"]


def answered(out: testing.State) -> str | None:
    return out.get_relation(2).local_unit_data.get("mounted")


@pytest.fixture
def secret() -> testing.Secret:
    return testing.Secret(CONTENT)


@pytest.fixture
def ready(site: Site, secret: testing.Secret) -> testing.State:
    """Return the state in which everything is ready."""
    return site.state(offer(volume(secret)), secrets=[secret])


EVENTS = ["install", "start", "config_changed", "update_status", "upgrade_charm"]


@pytest.mark.parametrize("event", EVENTS)
def test_every_event_reaches_the_same_mount(site: Site, ready: testing.State, event: str):
    out = site.ctx.run(getattr(site.ctx.on, event)(), ready)
    assert out.unit_status == MOUNTED
    assert out.workload_version == "1.3.1"
    plan = site.plan
    assert plan.spec == mount_plan.Spec.model_validate(WHERE | {"mountpoint": "/mnt/shared"})
    assert plan.unit == "juicefs-shared-filesystem-client.service"
    assert (plan.fstypes, plan.source) == (("fuse.juicefs",), "JuiceFS:shared")
    assert plan.servers == ((("10.0.0.5", 6379),), (("10.0.0.5", 2022),))
    assert environment(plan) == 'REDIS_PASSWORD="topSecret1"\n'
    assert site.mounter.units == {"shared-filesystem-client/0"}
    assert site.mounter.resources == [site.program.path]
    assert set(plan.secrets) == {"topSecret1", "juicefs-objects", "topSecret2"}
    assert "topSecret" not in repr(
        [out.relations, out.unit_status, site.ctx.juju_log, plan, plan.unit_text]
    )


KEY = "AQCl3+poAAAAABAAq5cPw7qTB0q1BDtpRk9y3Q=="


def test_cephfs_is_mounted_with_the_key_of_the_providers_secret(
    site: Site, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(cephfs, "ensure_client", lambda spec: cephfs.KERNEL)
    monkeypatch.setattr(
        cephfs, "run", lambda *argv, **_: Completed(0, "19.2.1-0ubuntu0.24.04.2", "")
    )
    monkeypatch.setattr(kernel, "run", lambda *argv: Completed(0, "mnt-shared.mount\n", ""))
    secret = testing.Secret({"key": KEY})
    share = f"cephfs://u@(10.0.0.1%3A6789)/?fsid=f&name=n&auth={secret.id}&auth-rev=1"
    out = site.ctx.run(site.ctx.on.config_changed(), site.state(offer(share), secrets=[secret]))
    assert out.unit_status == testing.ActiveStatus(
        "u@f.n=/ is mounted at /mnt/shared by mount.ceph"
    )
    plan = site.plan
    assert list(plan.files.values()) == [f"{KEY}\n"]
    assert KEY not in repr(
        [out.relations, out.unit_status, site.ctx.juju_log, plan, plan.unit_text]
    )
    changed = dataclasses.replace(secret, latest_content={"key": "AQD" + KEY[3:]})
    site.ctx.run(site.ctx.on.secret_changed(changed), dataclasses.replace(out, secrets={changed}))
    assert list(site.plan.files.values()) == [f"AQD{KEY[3:]}\n"]
    keyless = dataclasses.replace(secret, latest_content={"password": "topSecret"})
    out = site.ctx.run(
        site.ctx.on.secret_changed(keyless), dataclasses.replace(out, secrets={keyless})
    )
    assert out.unit_status == testing.BlockedStatus(
        "proxy offers a secret without the key of Ceph's user"
    )


@pytest.mark.parametrize(("offered", "config", "status", "message"), CASES["refused"])
def test_the_status_shows_a_missing_or_wrong_option(
    site: Site, offered: str | None, config: dict[str, typing.Any], status: str, message: str
):
    relations = (
        []
        if offered is None
        else [offer({"volume": volume(), "nothing": None}.get(offered, offered))]
    )
    out = site.ctx.run(
        site.ctx.on.config_changed(), site.state(*relations, config=WHERE_TO_MOUNT | config)
    )
    assert out.unit_status.name == status
    assert out.unit_status.message.startswith(message)
    assert site.mounter.mounted is None
    assert "topSecret" not in repr(site.ctx.juju_log)


@pytest.mark.parametrize("hangs", [True, False])
def test_since_when_a_server_is_away(site: Site, ready: testing.State, hangs: bool):
    site.mounter.seen = keeper.Health(hung=1.8e9, down="10.0.0.5:6379 is silent", down_since=1.8e9)
    site.mounter.look = mounts.Result(mounts.State.HUNG, "no answer")
    site.mounter.error = None if hangs else juicefs.UnreachableError("10.0.0.5:6379 is silent")
    out = site.ctx.run(site.ctx.on.update_status(), ready)
    text = "10.0.0.5:6379 is silent since 2027-01-15 08:00:00 UTC; the mount waits for it"
    assert out.unit_status == testing.WaitingStatus(text)


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (
            juicefs.UnreachableError("db is silent"),
            testing.WaitingStatus("db is silent; the mount waits for it"),
        ),
        (
            mount_plan.NotYetError("modules are on their way"),
            testing.WaitingStatus("modules are on their way"),
        ),
        (
            mount_plan.MountError("/mnt/shared holds files"),
            testing.BlockedStatus("/mnt/shared holds files"),
        ),
        (CommandError("apt-get exited 100"), testing.BlockedStatus("apt-get exited 100")),
    ],
)
def test_failures_are_shown_and_recover_by_themselves(
    site: Site, ready: testing.State, error: Exception, status: ops.StatusBase
):
    site.mounter.error = error
    out = site.ctx.run(site.ctx.on.config_changed(), ready)
    assert out.unit_status == status
    site.mounter.error = None
    assert site.ctx.run(site.ctx.on.update_status(), out).unit_status == MOUNTED


@pytest.mark.parametrize(("look", "waits", "status", "message"), copy.deepcopy(CASES["looks"]))
def test_active_means_that_the_mount_works(
    site: Site,
    ready: testing.State,
    look: dict[str, typing.Any],
    waits: bool,
    status: str,
    message: str,
):
    site.mounter.look = mounts.Result(mounts.State(look.pop("state")), **look)
    site.mounter.waits = waits
    state = dataclasses.replace(
        ready, relations={*ready.relations, asked(mountpoint="/mnt/shared")}
    )
    out = site.ctx.run(site.ctx.on.update_status(), state)
    assert (out.unit_status.name, out.unit_status.message) == (status, message)
    assert answered(out) == ("true" if status == "active" else "false")


def test_no_folder_above_the_mounted_one_can_be_replaced(site: Site):
    """Once before the first mount; a failure is the status, and is tried again."""
    config = {"mountpoint": "/mnt/shared", "subdirectory": "a"}
    state = site.state(offer(dataclasses.replace(volume(), subdir="/team")), config=config)
    site.mounter.sticky_error = juicefs.JuicefsError("juicefs sync: no")
    out = site.ctx.run(site.ctx.on.config_changed(), state)
    assert out.unit_status == testing.BlockedStatus("juicefs sync: no")
    assert site.mounter.mounted is None
    assert site.mounter.looked_at == ["/team/a"]
    site.mounter.sticky_error = None
    for _ in range(2):
        out = site.ctx.run(site.ctx.on.config_changed(), out)
    assert isinstance(out.unit_status, testing.ActiveStatus)
    assert site.mounter.looked_at[1:] == ["/team/a", "/team", "/"]
    logged = [line.message for line in site.ctx.juju_log if line.level == "WARNING"]
    assert logged == [
        f"volume shared: {folder} had mode 0777" for folder in ("/team/a", "/team", "/")
    ]
    other = dataclasses.replace(out, config={**out.config, "subdirectory": "b"})
    site.ctx.run(site.ctx.on.config_changed(), other)
    assert site.mounter.looked_at[4:] == ["/team/b", "/team", "/"]
    reader = {**config, "subdirectory": "c", "read-only": True}
    site.ctx.run(site.ctx.on.config_changed(), dataclasses.replace(out, config=reader))
    assert len(site.mounter.looked_at) == 7


def test_a_charm_beside_requests_a_mount_and_reads_when_it_is_there(
    site: Site, secret: testing.Secret
):
    request = asked(mountpoint="/srv/slurmctld-statefs", noexec=True)
    state = site.state(offer(volume(secret)), request, config={}, secrets=[secret])
    out = site.ctx.run(site.ctx.on.relation_changed(request), state)
    assert out.unit_status == testing.ActiveStatus(
        "JuiceFS:shared is mounted at /srv/slurmctld-statefs"
    )
    assert answered(out) == "true"
    plan = site.plan
    assert plan.spec == mount_plan.Spec.model_validate(
        WHERE | {"mountpoint": "/srv/slurmctld-statefs", "noexec": True}
    )


def test_a_charm_beside_that_has_not_asked_yet_is_waited_for(site: Site, secret: testing.Secret):
    state = site.state(offer(volume(secret)), asked(), config={}, secrets=[secret])
    out = site.ctx.run(site.ctx.on.relation_created(state.get_relation(2)), state)
    assert out.unit_status == testing.WaitingStatus("waiting for slurmctld to request a mountpoint")
    assert answered(out) == "false"


def test_two_places_are_a_contradiction(site: Site, ready: testing.State):
    state = dataclasses.replace(ready, relations={*ready.relations, asked(mountpoint="/srv/other")})
    out = site.ctx.run(site.ctx.on.config_changed(), state)
    assert out.unit_status == testing.BlockedStatus(
        "mountpoint: /mnt/shared is set, and slurmctld requests /srv/other: reset the option"
    )
    assert answered(out) == "false"


def test_without_its_provider_the_mount_goes(site: Site, ready: testing.State):
    first = site.ctx.run(site.ctx.on.config_changed(), ready)
    out = site.ctx.run(site.ctx.on.relation_broken(first.get_relation(1)), first)
    assert site.mounter.mounted is None
    assert not list(readiness.DIRECTORY.iterdir())  # it may be the unit's last hook
    assert out.unit_status == testing.BlockedStatus(
        "nothing to mount: juju integrate shared-filesystem-client:filesystem PROVIDER:filesystem"
    )


def test_a_provider_that_stops_offering_does_not_take_the_mount_away(
    site: Site, ready: testing.State
):
    first = site.ctx.run(site.ctx.on.config_changed(), ready)
    silent = dataclasses.replace(first.get_relation(1), remote_app_data={})
    out = site.ctx.run(
        site.ctx.on.relation_changed(silent),
        dataclasses.replace(first, relations={silent, beside()}),
    )
    assert site.mounter.mounted is not None
    assert out.unit_status == testing.WaitingStatus("waiting for proxy to offer a filesystem")


@pytest.mark.parametrize("endpoint", ["juju-info", "mount"])
def test_the_mount_goes_with_the_relation_to_the_machines_charm_since_no_later_hook_is_certain(
    site: Site, secret: testing.Secret, endpoint: str
):
    relation = beside() if endpoint == "juju-info" else asked(mountpoint="/mnt/shared")
    before = site.state(offer(volume(secret)), secrets=[secret])
    before = dataclasses.replace(before, relations={offer(volume(secret)), relation})
    out = site.ctx.run(site.ctx.on.update_status(), before)
    assert out.unit_status == MOUNTED
    gone = site.ctx.run(site.ctx.on.relation_broken(out.get_relation(relation.id)), out)
    assert site.mounter.mounted is None
    assert not list(readiness.DIRECTORY.iterdir())
    assert (
        gone.unit_status == MOUNTED
    )  # nothing is reported to a Juju that may have deleted the unit
    # Juju may still look at the unit before it stops it
    left = dataclasses.replace(
        gone, relations={one for one in gone.relations if one.id != relation.id}
    )
    site.ctx.run(site.ctx.on.update_status(), left)
    site.ctx.run(site.ctx.on.stop(), left)
    assert site.mounter.mounted is None
    assert not list(readiness.DIRECTORY.iterdir())


def test_a_unit_that_stays_beside_its_charm_keeps_the_mount(site: Site, ready: testing.State):
    request = asked(app="slurmd", mountpoint="/mnt/shared")
    out = site.ctx.run(
        site.ctx.on.update_status(),
        dataclasses.replace(ready, relations={*ready.relations, request}),
    )
    site.ctx.run(site.ctx.on.relation_broken(out.get_relation(request.id)), out)
    assert site.mounter.mounted is not None


@pytest.mark.parametrize("event", ["created", "joined", "changed", "departed", "broken"])
def test_another_machines_principal_is_none_of_ours(
    site: Site, ready: testing.State, monkeypatch: pytest.MonkeyPatch, event: str
):
    """Juju 4 sent sackd's juju-info-relation-created and -joined to a unit on slurmd's machine."""
    ctx = context(principal="slurmd/0")
    other = beside("sackd", number=98)
    request = asked(app="slurmctld", mountpoint="/srv/slurmctld-statefs")
    state = dataclasses.replace(ready, relations={*ready.relations, other, request})
    first = ctx.run(ctx.on.update_status(), state)
    assert first.unit_status == MOUNTED  # not where another machine's charm asks for it
    out = ctx.run(getattr(ctx.on, f"relation_{event}")(first.get_relation(98)), first)
    assert (site.mounter.changes, site.plan.spec.mountpoint) == (1, "/mnt/shared")
    assert out.relations == first.relations
    assert out.unit_status == (MOUNTED if event in ("created", "broken") else first.unit_status)
    # When its own principal's relation goes, it goes too, even if Juju still lists others
    ctx.run(ctx.on.relation_broken(first.get_relation(99)), first)
    assert site.mounter.mounted is None


def test_a_plan_that_cannot_be_drawn_keeps_no_job_from_a_mount_that_works(
    site: Site, ready: testing.State
):
    out = site.ctx.run(site.ctx.on.update_status(), ready)
    site.mounter.seen = keeper.Health(state="right")
    wrong = dataclasses.replace(out, config={"mountpoint": "/mnt/shared", "profile": "fast"})
    out = site.ctx.run(site.ctx.on.config_changed(), wrong)
    assert isinstance(out.unit_status, testing.BlockedStatus)
    need = records.read(readiness.Need, readiness.DIRECTORY / "shared-filesystem-client-0.json")
    assert need.boot == readiness.BOOT_ID.read_text().strip()
    site.mounter.seen = keeper.Health(state="hung")
    site.ctx.run(site.ctx.on.config_changed(), out)
    assert readiness.missing()[0].startswith("shared-filesystem-client/0 (profile: ")


def test_until_a_mount_works_jobs_wait_and_the_keeper_is_to_wake_the_unit(
    site: Site, ready: testing.State, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(wake, "later", lambda unit, charm: pytest.fail("the keeper wakes it"))
    monkeypatch.setattr(wake, "command", lambda unit, charm: ["wake", unit])
    site.mounter.look = mounts.Result(mounts.State.HUNG, "no answer")
    out = site.ctx.run(site.ctx.on.config_changed(), ready)
    assert readiness.missing() == ["shared-filesystem-client/0 (no answer)"]
    assert site.mounter.wakes == {
        "shared-filesystem-client/0": ["wake", "shared-filesystem-client/0"]
    }
    site.mounter.look = mounts.Result(mounts.State.RIGHT)
    out = site.ctx.run(site.ctx.on.update_status(), out)
    assert readiness.missing() == []
    assert site.mounter.wakes == {"shared-filesystem-client/0": []}


@pytest.mark.parametrize("event", ["stop", "remove"])
def test_the_unit_leaves_nothing(site: Site, ready: testing.State, event: str):
    first = site.ctx.run(site.ctx.on.config_changed(), ready)
    out = site.ctx.run(getattr(site.ctx.on, event)(), first)
    assert (site.mounter.mounted, site.mounter.units) == (None, set())
    assert not list(readiness.DIRECTORY.iterdir())
    assert out.unit_status == MOUNTED
