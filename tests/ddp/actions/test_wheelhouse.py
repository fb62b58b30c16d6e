"""An environment from a folder or an archive of wheels, for clusters that reach no package index."""

import pathlib
import stat
import subprocess
import tarfile
import typing
import zipfile

import pytest
from cluster import Cluster
from harness import Trainer
from pip_double import Pip
from wheelhouses import WHEELS, add, make

from ddp.environment import archives, environments
from ddp.workspace.files import RefusedError
from slurm_ddp.run import CommandTimeout


@pytest.mark.parametrize("form", ["", ".tar", ".tar.zst", ".zip"])
def test_no_index_is_asked(trainer: Trainer, cluster: Cluster, pip: Pip, form: str):
    seen: list[dict[str, bytes]] = []
    install = pip.run

    def look(*argv: typing.Any, **how: typing.Any) -> typing.Any:
        for word in map(str, argv):
            if word.startswith("--find-links="):
                folder = pathlib.Path(word.removeprefix("--find-links="))
                seen.append({path.name: path.read_bytes() for path in folder.iterdir()})
        return install(*argv, **how)

    trainer.config["torch-index"] = "https://wheels.example"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(environments, "run", look)
        results = trainer.run("install-environment", wheelhouse=make(trainer.workspace, form))
    installs = [call for call in pip.calls if "install" in call]
    assert len(installs) == 2
    for call in installs:
        assert {"--no-index", "--only-binary=:all:"} <= set(call)
        assert not [word for word in call if "index-url" in word]
    assert "--require-hashes" in installs[0]
    assert installs[1][-1] == "torch==2.13.0+cpu"
    assert seen == [WHEELS, WHEELS]
    assert results["torch"] == "2.13.0+cpu"
    assert len(results["wheelhouse"]) == 16
    made = len(pip.calls)
    trainer.run("install-environment")
    trainer.run("submit-ddp", workload="smoke")
    assert len(pip.calls) == made, "jobs use it"


def test_an_attached_wheelhouse_is_used_by_itself(trainer: Trainer, cluster: Cluster, pip: Pip, tmp_path: pathlib.Path):
    resource = trainer.root / "wheelhouse"
    resource.write_bytes(pathlib.Path(make(trainer.workspace, ".zip")).read_bytes())
    resource.chmod(0o600)
    trainer.run("submit-ddp", workload="smoke")
    installs = [call for call in pip.calls if "install" in call]
    assert len(installs) == 2
    assert all("--no-index" in call for call in installs)
    results = trainer.run("install-environment")
    assert len(results["wheelhouse"]) == 16
    assert trainer.run("install-environment", wheelhouse=f"{trainer.workspace}/wheels.zip") == results, (
        "the same wheels"
    )
    assert len([call for call in pip.calls if "install" in call]) == 2
    resource.write_bytes(pathlib.Path(make(trainer.workspace, ".tar")).read_bytes())
    assert trainer.run("install-environment")["wheelhouse"] != results["wheelhouse"]
    resource.write_bytes(b"no archive at all" * 100)
    assert trainer.fails("install-environment").startswith("wheelhouse: ")


def test_other_wheels_make_another_environment(trainer: Trainer, cluster: Cluster, pip: Pip):
    path = make(trainer.workspace, "")
    first = trainer.run("install-environment", wheelhouse=path)
    calls = len(pip.calls)
    assert trainer.run("install-environment", wheelhouse=path) == first
    assert len(pip.calls) == calls
    (pathlib.Path(path) / "numpy-2.0-py3-none-any.whl").write_bytes(b"repaired")
    second = trainer.run("install-environment", wheelhouse=path)
    assert second["wheelhouse"] != first["wheelhouse"]
    assert len(pip.calls) > calls


def test_a_wheel_that_is_missing_is_named(trainer: Trainer, cluster: Cluster, pip: Pip):
    pip.failure = (
        "ERROR: Could not find a version that satisfies the requirement sympy>=1.13.3 (from torch) (from versions: none)\n"
        "ERROR: No matching distribution found for sympy>=1.13.3"
    )
    message = trainer.fails("install-environment", wheelhouse=make(trainer.workspace, ".tar"))
    assert message.startswith("wheelhouse: no wheel of sympy>=1.13.3 for Python 3.12 on ")
    assert not list((trainer.workspace / "environments").iterdir())


def test_a_wheel_that_is_not_the_locked_one_is_refused(trainer: Trainer, cluster: Cluster, pip: Pip):
    pip.failure = "ERROR: THESE PACKAGES DO NOT MATCH THE HASHES FROM THE REQUIREMENTS FILE."
    message = trainer.fails("install-environment", wheelhouse=make(trainer.workspace, ""))
    assert message == "pip: THESE PACKAGES DO NOT MATCH THE HASHES FROM THE REQUIREMENTS FILE."


def bad(folder: pathlib.Path, kind: str) -> str:
    path = folder / "bad.tar"
    with tarfile.open(path, "w") as archive:
        add(archive, "a.whl")
        if kind == "up":
            add(archive, "x/../../evil.whl")
        elif kind == "absolute":
            add(archive, "/tmp/evil.whl")
        elif kind == "link":
            add(archive, "evil.whl", b"", type=tarfile.SYMTYPE, linkname="/etc/passwd")
        elif kind == "hard":
            add(archive, "evil.whl", b"", type=tarfile.LNKTYPE, linkname="../../x")
        elif kind == "device":
            add(archive, "evil.whl", b"", type=tarfile.CHRTYPE)
        elif kind == "twice":
            add(archive, "y/a.whl")
    return str(path)


REFUSED = {
    "up": "leads outside", "absolute": "leads outside", "link": "is a link or a device", "hard": "is a link or a device",
    "device": "is a link or a device", "twice": "holds a.whl twice",
}  # fmt: skip


@pytest.mark.parametrize("kind", REFUSED)
def test_an_archive_that_leads_outside_is_refused(
    trainer: Trainer,
    cluster: Cluster,
    pip: Pip,
    tmp_path: pathlib.Path,
    kind: str,
):
    message = trainer.fails("install-environment", wheelhouse=bad(trainer.workspace, kind))
    assert message.startswith("wheelhouse: ")
    assert REFUSED[kind] in message
    assert not list(tmp_path.rglob("evil.whl"))
    assert not list((tmp_path / "cache").iterdir()), "nothing is left"
    assert not [call for call in pip.calls if "install" in call]


@pytest.mark.parametrize("name", ["../../evil.whl", "/evil.whl", "a\\..\\..\\evil.whl"])
def test_a_zip_that_leads_outside_is_refused(tmp_path: pathlib.Path, name: str):
    with zipfile.ZipFile(tmp_path / "w.zip", "w") as archive:
        archive.writestr(zipfile.ZipInfo(name), "x")
    with pytest.raises(RefusedError, match="leads outside"):
        archives.open_wheelhouse(str(tmp_path / "w.zip"), str(tmp_path / "target"))


def test_a_link_in_a_zip_is_refused(tmp_path: pathlib.Path):
    with zipfile.ZipFile(tmp_path / "w.zip", "w") as archive:
        link = zipfile.ZipInfo("evil.whl")
        link.external_attr = (stat.S_IFLNK | 0o777) << 16
        archive.writestr(link, "/etc/passwd")
    with pytest.raises(RefusedError, match="is a link or a device"):
        archives.open_wheelhouse(str(tmp_path / "w.zip"), str(tmp_path / "target"))


@pytest.mark.parametrize("form", [".tar", ".tar.zst", ".zip"])
def test_a_damaged_archive_is_refused(trainer: Trainer, cluster: Cluster, pip: Pip, form: str):
    path = pathlib.Path(make(trainer.workspace, form))
    path.write_bytes(path.read_bytes()[:3000])
    assert " is damaged: " in trainer.fails("install-environment", wheelhouse=str(path))


def test_a_real_zstd_archive_is_read(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
    try:
        subprocess.run(["zstd", "--version"], check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("zstd is not installed here; scripts/setup.sh installs it")
    plain = pathlib.Path(make(tmp_path, ".tar"))
    subprocess.run(["zstd", "-q", str(plain), "-o", f"{plain}.zst"], check=True)
    target = tmp_path / "target"
    assert archives.open_wheelhouse(f"{plain}.zst", str(target))["wheels"] == 2
    assert {path.name: path.read_bytes() for path in target.iterdir()} == WHEELS
    (tmp_path / "cut.tar.zst").write_bytes(pathlib.Path(f"{plain}.zst").read_bytes()[:-20])
    with pytest.raises(RefusedError, match="is damaged"):
        archives.open_wheelhouse(str(tmp_path / "cut.tar.zst"), str(tmp_path / "other"))


def test_what_is_no_wheelhouse_says_why(trainer: Trainer, cluster: Cluster, tmp_path: pathlib.Path):
    top = trainer.workspace
    (top / "empty").mkdir()
    (top / "notes.txt").write_text("x")
    (tmp_path / "outside").mkdir()
    (top / "away").symlink_to(tmp_path / "outside")
    (top / "linked").mkdir()
    (top / "linked" / "a.whl").symlink_to("/etc/passwd")
    for path, why in {
        f"{top}/empty": "no .whl file is in empty",
        f"{top}/notes.txt": "is no folder, and no .tar, .tar.zst or .zip",
        f"{top}/away": "outside the workspace",
        f"{top}/linked": "is no plain file",
        f"{top}/absent": "is not there",
        "/etc": "is outside the workspace",
    }.items():
        message = trainer.fails("install-environment", wheelhouse=path)
        assert message.startswith("wheelhouse: "), message
        assert why in message


@pytest.mark.parametrize("is_offline", [False, True])
def test_what_takes_too_long_is_reported_with_where_to_look(
    trainer: Trainer,
    cluster: Cluster,
    pip: Pip,
    monkeypatch: pytest.MonkeyPatch,
    is_offline: bool,
):
    install = pip.run

    def hang(*argv: typing.Any, timeout: float, **how: typing.Any) -> typing.Any:
        if "install" in argv:
            raise CommandTimeout(f"pip: no answer within {timeout:g} s")
        return install(*argv, timeout=timeout, **how)

    monkeypatch.setattr(environments, "run", hang)
    given = {"wheelhouse": make(trainer.workspace, "")} if is_offline else {}
    hint = (
        "is the filesystem of the wheelhouse slow?" if is_offline else "is the package index reachable from this host?"
    )
    assert trainer.fails("install-environment", **given) == f"pip: no answer within 5400 s; {hint}"
    assert not list((trainer.workspace / "environments").iterdir()), "nothing half made stays"
