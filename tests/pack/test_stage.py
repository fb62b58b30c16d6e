"""Staging: the folders that charms are packed from, and that the sandbox runs."""

import pathlib

import pytest

from scripts import pack


@pytest.fixture
def tree(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """A repository with one charm, `ddp-trainer`, which carries the payload."""
    for name in (
        "charms/ddp-trainer/charmcraft.yaml",
        "charms/ddp-trainer/requirements.in",
        "charms/ddp-trainer/requirements.txt",
        "charms/ddp-trainer/src/charm.py",
        "charms/ddp-trainer/src/templates/job.j2",
        "charms/ddp-trainer/src/__pycache__/charm.cpython-312.pyc",
        "charms/ddp-trainer/tests/test_charm.py",
        "charms/ddp-trainer/.ruff_cache/x",
        "charms/ddp-trainer/metadata.yaml",
        "lib/slurm_ddp/commands.py",
        "lib/ddp/cli.py",
        "lib/ddp/node/x.py",
        "lib/other/x.py",
        "payload/requirements.txt",
        "payload/ddptrain/__main__.py",
        "payload/.env",
    ):
        path = tmp_path / "repo" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    monkeypatch.setattr(pack, "ROOT", tmp_path / "repo")
    return tmp_path / "repo"


STAGED = {
    "charmcraft.yaml",
    "requirements.txt",
    "src/charm.py",
    "src/cos/dashboards/run.json",
    "src/cos/dashboards/training.json",
    "src/templates/job.j2",
    "lib/slurm_ddp/commands.py",
    "lib/ddp/cli.py",
    "lib/ddp/node/x.py",
    "payload/requirements.txt",
    "payload/ddptrain/__main__.py",
}


def files(folder: pathlib.Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_a_stage_holds_the_charm_the_library_and_the_payload(
    tree: pathlib.Path, tmp_path: pathlib.Path
):
    pack.stage("ddp-trainer", tmp_path / "stage")
    assert files(tmp_path / "stage") == STAGED


def test_staging_follows_the_source_and_keeps_the_folder(
    tree: pathlib.Path, tmp_path: pathlib.Path
):
    stage = tmp_path / "stage"
    pack.stage("ddp-trainer", stage)
    inode = stage.stat().st_ino
    (tree / "charms/ddp-trainer/src/charm.py").write_text("new")
    (tree / "charms/ddp-trainer/src/charm.py").chmod(0o755)
    (tree / "charms/ddp-trainer/src/templates/job.j2").unlink()
    (stage / "left-over").mkdir()
    (stage / "left-over/file").touch()
    (stage / "parts").mkdir()
    (stage / "parts/of-charmcraft").touch()
    pack.stage("ddp-trainer", stage)
    assert stage.stat().st_ino == inode
    assert files(stage) == STAGED - {"src/templates/job.j2"} | {"parts/of-charmcraft"}
    assert not (stage / "src/templates").exists()
    assert (stage / "src/charm.py").read_text() == "new"
    assert (stage / "src/charm.py").stat().st_mode & 0o777 == 0o755


def test_a_link_is_refused(tree: pathlib.Path, tmp_path: pathlib.Path):
    (tree / "charms/ddp-trainer/src/link.py").symlink_to("charm.py")
    with pytest.raises(pack.PackError, match=r"src/link\.py is a link; a charm holds files only"):
        pack.stage("ddp-trainer", tmp_path / "stage")


MODES = [
    ("ubuntu 24.04", True, "3.12", ["managed", "managed"]),
    ("ubuntu 24.04", False, "3.12", ["here", "wheels 3.14"]),
    ("ubuntu 26.04", False, "3.14", ["wheels 3.12", "here"]),
    ("debian 12", True, "3.11", ["wheels 3.12", "wheels 3.14"]),
]


@pytest.mark.parametrize(("system", "has_lxd", "python", "expected"), MODES, ids=str)
def test_the_mode_chooses_itself(
    monkeypatch: pytest.MonkeyPatch, system: str, has_lxd: bool, python: str, expected: list[str]
):
    release = dict(zip(("ID", "VERSION_ID"), system.split(), strict=True))
    monkeypatch.setattr(pack.platform, "freedesktop_os_release", lambda: release)
    monkeypatch.setattr(pack.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(pack, "_succeeds", lambda *_: has_lxd)
    monkeypatch.setattr(pack, "_system_python", lambda: python)
    modes = [pack.choose_mode(base) for base in pack.BASES]
    names = [
        "managed" if mode.managed else f"wheels {mode.python}" if mode.disguise else "here"
        for mode in modes
    ]
    assert names == expected
