"""What actions do to a volume."""

import gzip
import json
import pathlib
import typing

import pytest
import yaml
from doubles import QUOTAS, UUID
from ops import testing
from rig import Config, Rig, peers

import charm
from slurm_ddp.commands import CommandError
from volume import actions

CASES = yaml.safe_load(pathlib.Path(__file__).with_suffix(".yaml").read_text())

URL, OTHER = "redis://db:6379/1", "22222222-2222-3333-4444-555555555555"
EXTERNAL: Config = {"metadata-url": "redis://db/1", "bucket": "https://h/b"}
CONTENT = {"meta-password": "topSecret1", "access-key": "topSecret2", "secret-key": "topSecret3"}
META = yaml.safe_load((pathlib.Path(charm.__file__).parents[1] / "charmcraft.yaml").read_text())


@pytest.fixture
def state(rig: Rig) -> testing.State:
    """Return an external volume that is offered."""
    secret = testing.Secret(CONTENT)
    config: Config = {**EXTERNAL, "credentials": secret.id}
    return rig.ctx.run(
        rig.ctx.on.config_changed(), rig.state(peers(), config=config, secrets=[secret])
    )


def act(
    rig: Rig, state: testing.State, name: str, /, **params: typing.Any
) -> dict[str, typing.Any]:
    rig.ctx.run(
        rig.ctx.on.action(
            name, params={key.replace("_", "-"): value for key, value in params.items()}
        ),
        state,
    )
    found = dict(rig.ctx.action_results or {})
    assert "topSecret" not in repr(
        [found, rig.ctx.action_logs, rig.ctx.juju_log, rig.world.commands]
    )
    return found


def failure(rig: Rig, state: testing.State, name: str, /, **params: typing.Any) -> str:
    with pytest.raises(testing.ActionFailed) as caught:
        act(rig, state, name, **params)
    assert "\n" not in caught.value.message
    return caught.value.message


def test_the_actions_are_those_that_are_declared_with_the_same_parameters():
    assert set(META["actions"]) == set(actions.ACTIONS)
    for name, action in actions.ACTIONS.items():
        model = action.parameters
        fields = {field.alias or key for key, field in model.model_fields.items()}
        declared = META["actions"][name].get("params", {})
        assert set(declared) == fields, name
        for key, field in model.model_fields.items():
            if not field.is_required() and key != "timeout":
                assert declared[field.alias or key].get("default") == field.default, (name, key)


def test_fsck_says_that_all_is_there_or_what_is_lost(rig: Rig, state: testing.State):
    printed = "juicefs[1] <INFO>: Used by 3 slices (12 bytes) [fsck@fsck.go:198]\njuicefs[1] <INFO>: flush session 0:\n"
    rig.world.answers["fsck"] = printed
    found = act(rig, state, "fsck")
    assert rig.world.commands[-1] == ("fsck", URL)
    assert (found["state"], found["summary"]) == ("clean", "Used by 3 slices (12 bytes)")
    report = pathlib.Path(found["report"])
    assert report.read_text() == printed
    assert (report.stat().st_mode & 0o777, report.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    printed = "juicefs[1] <ERROR>: can't find block\njuicefs[1] <FATAL>: 2 objects are lost (8 bytes): [main.go:31]\n"
    rig.world.answers["fsck"] = CommandError("juicefs exited 1", returncode=1, stderr=printed)
    message = failure(rig, state, "fsck")
    assert message.startswith("fsck: 2 objects are lost (8 bytes):; its whole report: /")
    assert pathlib.Path(message.rpartition(" ")[2]).read_text() == printed


def test_gc_deletes_only_when_asked_to(rig: Rig, state: testing.State):
    rig.world.answers["gc"] = "<INFO>: scanned 5 objects, 4 valid, 1 leaked (4 bytes)\n"
    found = act(rig, state, "gc")
    assert rig.world.commands[-1] == ("gc", URL)
    assert found["mode"] == "dry run: nothing was deleted; delete=true does"
    assert found["summary"] == "scanned 5 objects, 4 valid, 1 leaked (4 bytes)"
    found = act(rig, state, "gc", delete=True, compact=True)
    assert rig.world.commands[-1] == ("gc", URL, "--delete", "--compact")
    assert found["mode"] == "deleted"


def backup(uuid: str = UUID, *, packed: bool = True) -> bytes:
    text = json.dumps(
        {"Setting": {"Name": "shared", "UUID": uuid, "SecretKey": "removed"}, "FSTree": {}},
        indent=1,
    )
    return gzip.compress(text.encode(), mtime=0) if packed else text.encode()


def dumping(content: bytes) -> typing.Callable[..., str]:
    def dump(*arguments: str) -> str:
        path = pathlib.Path(arguments[-1])
        assert path.stat().st_mode & 0o777 == 0o600
        path.write_bytes(content)
        return ""

    return dump


def test_a_backup_is_a_file_for_root_alone(rig: Rig, state: testing.State):
    rig.world.answers["dump"] = dumping(backup())
    found = act(rig, state, "backup-metadata")
    path = pathlib.Path(found["file"])
    assert path.read_bytes() == backup()
    assert path.stat().st_mode & 0o777 == 0o600
    assert (found["uuid"], found["bytes"]) == (UUID, str(len(backup())))
    assert rig.world.commands[-1][:2] == ("dump", URL)
    assert "--keep-secret-key" not in rig.world.commands[-1]
    assert [path.name] == [entry.name for entry in path.parent.iterdir()]


def test_a_backup_that_failed_or_is_of_something_else_is_not_kept(
    rig: Rig, state: testing.State, tmp_path: pathlib.Path
):
    rig.world.answers["dump"] = dumping(backup(OTHER))
    assert failure(rig, state, "backup-metadata") == (
        f"the backup is of volume {OTHER}, not {UUID}: it is not kept"
    )
    rig.world.answers["dump"] = CommandError("juicefs exited 1", stderr="<FATAL>: no space left")
    assert failure(rig, state, "backup-metadata").startswith(
        "dump: no space left; its whole report: "
    )
    assert list((tmp_path / "state").glob("*/backups/*")) == []


@pytest.mark.parametrize("packed", [True, False])
def test_a_backup_is_restored_into_an_empty_engine(
    rig: Rig, state: testing.State, tmp_path: pathlib.Path, packed: bool
):
    volume = rig.world.volumes.pop(URL)

    def load(*arguments: str) -> str:
        rig.world.volumes[arguments[1]] = volume
        return ""

    rig.world.answers["load"] = load
    path = tmp_path / "backup"
    path.write_bytes(backup(packed=packed))
    found = act(rig, state, "restore-metadata", uuid=UUID, file=str(path))
    assert (found["uuid"], found["volume"]) == (UUID, "shared")
    assert rig.world.commands[-1] == ("load", URL, str(path))


@pytest.mark.parametrize(
    ("params", "content", "message"),
    [
        (
            {"uuid": "x"},
            backup(),
            f"uuid: this application's volume is {UUID}: deploy another application for another",
        ),
        ({}, backup(OTHER), f"uuid: backup is a backup of volume {OTHER}, not {UUID}"),
        ({}, b"no backup", f"uuid: backup is a backup of volume unknown, not {UUID}"),
        ({}, b"\x1f\x8bnonsense", f"uuid: backup is a backup of volume unknown, not {UUID}"),
        (
            {"file": "backup"},
            backup(),
            "file: an absolute path on this unit is needed, like /tmp/backup.json.gz",
        ),
        (
            {},
            backup(),
            f"the metadata engine holds volume shared ({UUID}): restore into an empty one",
        ),
    ],
)
def test_nothing_is_restored_over_anything_else(
    rig: Rig,
    state: testing.State,
    tmp_path: pathlib.Path,
    *,
    params: dict[str, str],
    content: bytes,
    message: str,
):
    path = tmp_path / "backup"
    path.write_bytes(content)
    assert (
        failure(rig, state, "restore-metadata", **({"uuid": UUID, "file": str(path)} | params))
        == message
    )
    assert [command[0] for command in rig.world.commands] == ["format"]


def test_a_quota_is_set_listed_and_lifted(rig: Rig, state: testing.State):
    rig.world.answers["quota"] = QUOTAS
    found = act(rig, state, "set-quota", path="/data", capacity=5, inodes=100)
    assert (
        "quota",
        "set",
        URL,
        "--path",
        "/data",
        "--capacity",
        "5",
        "--inodes",
        "100",
    ) in rig.world.commands
    assert found["size"] == "5.0 GiB"
    found = act(rig, state, "list-quotas")
    assert rig.world.commands[-1] == ("quota", "list", URL)
    assert found["quotas"] == "/data: 1.6 MiB of 5.0 GiB, 314 of unlimited inodes"
    found = act(rig, state, "set-quota", path="/data", remove=True)
    assert rig.world.commands[-1] == ("quota", "delete", URL, "--path", "/data")
    assert (
        failure(rig, state, "set-quota", path="/data")
        == "capacity, inodes: set one of them, or remove=true"
    )
    assert failure(rig, state, "set-quota", path="/../etc", capacity=1).startswith(
        "path: an absolute path"
    )


# Of JuiceFS 1.4.2
QUOTAS_OF_ALL = """\
+----------+---------+------+------+-----------+-------+-------+
|  Path/ID |   Size  | Used | Use% |   Inodes  | IUsed | IUse% |
+----------+---------+------+------+-----------+-------+-------+
| /homes   | 3.0 GiB |  0 B |   0% | unchanged |     0 |       |
| gid:3001 | 7.0 GiB |  0 B |   0% | unchanged |     0 |       |
| uid:2001 | 2.0 GiB |  0 B |   0% |       100 |     0 |    0% |
+----------+---------+------+------+-----------+-------+-------+
"""


@pytest.mark.parametrize(("kind", "number", "size"), [("uid", 2001, "2.0"), ("gid", 3001, "7.0")])
def test_a_user_or_a_group_has_a_quota(
    rig: Rig, state: testing.State, kind: str, number: int, size: str
):
    rig.world.answers["quota"] = QUOTAS_OF_ALL
    found = act(rig, state, "set-quota", **{kind: number}, capacity=2)
    words = ("quota", "set", URL, f"--{kind}", str(number), "--capacity", "2")
    assert words in rig.world.commands
    assert (found[kind], found["size"]) == (str(number), f"{size} GiB")
    assert f"{kind}:{number}: 0 B of {size} GiB" in act(rig, state, "list-quotas")["quotas"]
    act(rig, state, "set-quota", **{kind: number}, remove=True)
    assert rig.world.commands[-1] == ("quota", "delete", URL, f"--{kind}", str(number))


@pytest.mark.parametrize("given", [{}, {"path": "/a", "uid": 7}, {"uid": 7, "gid": 7}])
def test_a_quota_limits_one_thing(rig: Rig, state: testing.State, given: dict[str, typing.Any]):
    line = failure(rig, state, "set-quota", capacity=1, **given)
    assert line == "path, uid, gid: give one of them"


@pytest.mark.parametrize("name", sorted(set(actions.ACTIONS) - {"restore-metadata"}))
def test_an_engine_that_is_away_fails_every_action_in_one_line(
    rig: Rig, state: testing.State, name: str
):
    rig.world.down.add("db:6379")
    params = {"set-quota": {"path": "/a", "capacity": 1}}.get(name, {})
    assert (
        failure(rig, state, name, **params)
        == "metadata engine: db:6379 does not answer (connection refused)"
    )


def test_the_export_holds_the_secrets_in_a_file_only(rig: Rig, state: testing.State):
    found = act(rig, state, "export-kubernetes", namespace="training", name=2024, size="500Gi")
    path = pathlib.Path(found["file"])
    assert path.stat().st_mode & 0o777 == 0o600
    assert found["apply"] == f"juju ssh juicefs-server-proxy/0 sudo cat {path} | kubectl apply -f -"
    documents = {item["kind"]: item for item in yaml.safe_load_all(path.read_text())}
    assert list(documents) == [
        "Secret",
        "StorageClass",
        "PersistentVolume",
        "PersistentVolumeClaim",
    ]
    assert list(yaml.safe_load_all(found["without-secrets"])) == list(documents.values())[1:]
    secret = documents["Secret"]["stringData"]
    envs = json.loads(secret.pop("envs"))
    assert secret == {"name": "shared", "metaurl": URL, "storage": "s3", "bucket": "https://h/b"}
    assert sorted(envs.values()) == ["topSecret1", "topSecret2", "topSecret3"]
    assert documents["PersistentVolume"]["spec"]["csi"]["volumeHandle"] == f"shared-{UUID}"
    assert documents["PersistentVolumeClaim"]["metadata"]["namespace"] == "training"


@pytest.mark.parametrize(("params", "message"), CASES["names_that_kubernetes_does_not_take"])
def test_names_that_kubernetes_does_not_take(
    rig: Rig, state: testing.State, params: dict[str, str], message: str
):
    assert failure(rig, state, "export-kubernetes", **params) == message
