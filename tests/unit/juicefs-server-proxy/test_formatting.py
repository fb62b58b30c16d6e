"""When a volume is formatted, moved or refused: each guard, on a double of juicefs."""

import dataclasses
import pathlib
import typing

import pytest
import yaml
from doubles import UUID
from rig import Rig

from slurm_ddp import juicefs, juicefs_access
from slurm_ddp.interfaces import filesystem_info as fs
from volume import format_journal, formatting, spec, target
from volume.formatting import Known, VolumeError

CASES = yaml.safe_load(pathlib.Path(__file__).with_suffix(".yaml").read_text())
APP, URL, BUCKET = "app", "redis://h:6379/1", "https://h/b"
ENGINE = juicefs_access.Engine("redis", ("h:6379",), "1")
WANTED = spec.Volume("shared", ENGINE, "s3", BUCKET, keyless=True)
EMBEDDED = spec.Volume("shared", ENGINE, "sftp", "new:2022:/data/", keyless=False)
THERE = juicefs.Setting("shared", UUID, "s3", BUCKET)
SERVED = juicefs.Setting("shared", UUID, "sftp", "old:2022:/data/")
KEYS = fs.JuicefsSecret.from_content({"access-key": "topSecret2", "secret-key": "topSecret3"})


def opened(volume: spec.Volume = WANTED, secret: fs.JuicefsSecret = KEYS) -> target.Target:
    return target.open_target(APP, volume, secret)


def commands(rig: Rig) -> list[str]:
    return [command[0] for command in rig.world.commands]


def test_a_volume_is_formatted_with_what_differs_from_the_defaults_alone(rig: Rig):
    announced: list[int] = []
    known = Known(None, announce=lambda: announced.append(len(rig.world.formats)))
    assert formatting.ensure_formatted(opened(), known) == THERE
    assert announced == [0], "before juicefs formats"
    (made,) = rig.world.formats
    assert made == (
        "format",
        "--no-update",
        "--storage=s3",
        f"--bucket={BUCKET}",
        "--trash-days=0",
        URL,
        "shared",
    )
    assert rig.world.format_env == {
        "AWS_ACCESS_KEY_ID": "topSecret2",
        "AWS_SECRET_ACCESS_KEY": "topSecret3",
    }
    assert (
        formatting.ensure_formatted(opened(), Known(UUID, announce=lambda: announced.append(9)))
        == THERE
    )
    assert (announced, commands(rig)) == ([0], ["format"])


@pytest.mark.parametrize("known", [Known(None, ours=True), Known(None, adopt=UUID), Known(UUID)])
def test_a_volume_that_is_ours_or_adopted_is_taken_as_it_is(rig: Rig, known: Known):
    rig.world.volumes[URL] = THERE
    assert formatting.ensure_formatted(opened(), known) == THERE
    assert commands(rig) == []


@pytest.mark.parametrize(("known", "there", "message"), CASES["refused"])
def test_another_volume_is_refused_and_nothing_is_done_to_it(
    rig: Rig, known: dict[str, typing.Any], there: dict[str, typing.Any] | None, message: str
):
    if there is not None:
        rig.world.volumes[URL] = dataclasses.replace(THERE, **there)
    with pytest.raises(VolumeError) as caught:
        formatting.ensure_formatted(
            opened(), Known(known.get("uuid"), known.get("ours", False), known.get("adopt", ""))
        )
    assert str(caught.value).startswith(message)
    assert commands(rig) == []


def test_an_embedded_volume_follows_its_server_once(rig: Rig):
    rig.world.volumes[URL] = SERVED
    formatting.ensure_bucket(
        opened(EMBEDDED), formatting.ensure_formatted(opened(EMBEDDED), Known(UUID))
    )
    moved = dataclasses.replace(SERVED, bucket=EMBEDDED.bucket)
    assert rig.world.volumes[URL] == moved
    assert rig.world.commands == [("config", f"--bucket={EMBEDDED.bucket}", "--yes", URL)]
    assert formatting.ensure_formatted(opened(EMBEDDED), Known(UUID)) == moved
    formatting.ensure_bucket(opened(EMBEDDED), moved)
    assert commands(rig) == ["config"]


@pytest.mark.parametrize("known", [Known("another"), Known(None)])
def test_a_volume_that_is_not_the_known_one_is_not_moved(rig: Rig, known: Known):
    rig.world.volumes[URL] = SERVED
    with pytest.raises(VolumeError):
        formatting.ensure_formatted(opened(EMBEDDED), known)
    assert commands(rig) == []


@pytest.mark.parametrize(
    ("reason", "has_advice"), [("Storage s3://b/ is not empty; clean it", True), ("403", False)]
)
def test_why_juicefs_did_not_format(rig: Rig, reason: str, has_advice: bool):
    rig.world.format_error = reason
    with pytest.raises(juicefs.JuicefsError) as caught:
        formatting.ensure_formatted(opened(), Known(None))
    assert str(caught.value).endswith(f"juicefs format: {reason}")
    assert ("choose another volume-name, bucket or prefix" in str(caught.value)) is has_advice


@pytest.mark.parametrize(
    ("change", "flag"),
    [
        ({"capacity_gib": 1}, "--capacity=1"),
        ({"inodes": 2}, "--inodes=2"),
        ({"trash_days": 1}, "--trash-days=1"),
    ],
)
def test_an_option_that_can_change_is_changed_alone(
    rig: Rig, change: dict[str, typing.Any], flag: str
):
    rig.world.volumes[URL] = THERE
    formatting.ensure_options(opened(), THERE)
    assert commands(rig) == []
    formatting.ensure_options(
        opened(dataclasses.replace(WANTED, format=spec.Format(**change))), THERE
    )
    assert rig.world.commands == [("config", flag, "--yes", URL)]


def test_removal_takes_the_charms_files_and_leaves_the_volume(rig: Rig, tmp_path: pathlib.Path):
    state = format_journal.STATE_DIR / APP
    program = target.program_path(APP)
    certificate = target.CONFIG_DIR / APP / "tls-ca.pem"
    for path in (
        program,
        certificate,
        state / "reports/x.log",
        state / "kubernetes/x.yaml",
        state / "backups/x.gz",
    ):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    format_journal.record(APP, URL, "shared")
    formatting.remove(APP)
    assert [path for path in tmp_path.rglob("*") if path.is_file() and path.name != "juicefs"] == [
        state / "backups/x.gz"
    ]
    assert not target.PROGRAM_DIR.exists()
    assert not target.CONFIG_DIR.exists()
    (state / "backups/x.gz").unlink()
    (state / "backups").rmdir()
    other = target.program_path("other")
    other.parent.mkdir(parents=True)
    formatting.remove(APP)
    assert not format_journal.STATE_DIR.exists()
    assert other.parent.exists()


def test_the_journal_knows_one_volume_until_it_is_forgotten(rig: Rig):
    assert not format_journal.has(APP, URL, "shared")
    format_journal.record(APP, URL, "shared")
    assert format_journal.has(APP, URL, "shared")
    assert not format_journal.has(APP, URL, "other")
    assert not format_journal.has(APP, "redis://other:6379/1", "shared")
    assert not format_journal.has("other", URL, "shared")
    format_journal.keep_credentials(APP, KEYS)
    assert format_journal.credentials(APP) == KEYS
    assert format_journal.credentials("other") is None
    kept, began = sorted(
        (format_journal.STATE_DIR / APP).iterdir(), key=lambda path: path.name == "format-began"
    )
    assert kept.stat().st_mode & 0o777 == 0o600
    assert (kept.name, began.name) == ("format-credentials.json", "format-began"), (
        "a charm before this one wrote them"
    )
    began.write_bytes(b"\xff\xfe")
    assert not format_journal.has(APP, URL, "shared")
    format_journal.forget(APP)
    format_journal.forget(APP)
    assert list((format_journal.STATE_DIR / APP).iterdir()) == []


@pytest.mark.parametrize("content", ["", "{", "[]", '{"secret-key": "a\\nb"}', "\x80"])
def test_credentials_that_are_not_whole_are_none(rig: Rig, content: str):
    format_journal.keep_credentials(APP, KEYS)
    (kept,) = (format_journal.STATE_DIR / APP).iterdir()
    kept.write_text(content, encoding="latin-1")
    assert format_journal.credentials(APP) is None
