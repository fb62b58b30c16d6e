"""A wheelhouse: a folder or an archive of wheels, for clusters that reach no package index."""

import contextlib
import io
import pathlib
import subprocess
import tarfile
import typing
import zipfile

import pytest
from cluster import Cluster
from pip_double import Pip

from ddp.actions import verbs
from ddp.environment import wheelhouse
from ddp.host.files import RefusedError
from ddp.options import fields
from ddp.problem import Problem
from ddp.results.result import texts_of
from ddp.settings import Settings

NAMES = (
    "wheels/README",
    "wheels/numpy-2.0-py3-none-any.whl",
    "wheels/torch-2.13.0+cpu-py3-none-any.whl",
)


def make(path: pathlib.Path, names: typing.Iterable[str] = NAMES, link: str = "") -> pathlib.Path:
    """Make a folder or an archive of these files, and of a link from `link.whl`."""
    if path.suffix == ".zip":
        with zipfile.ZipFile(path, "w") as zipped:
            if link:
                member = zipfile.ZipInfo("link.whl")
                member.external_attr = 0o120777 << 16
                zipped.writestr(member, link)
            for name in names:
                zipped.writestr(zipfile.ZipInfo(name), name)
    elif path.suffix:
        with tarfile.open(path, "w") as tar:
            if link:
                member = tarfile.TarInfo("link.whl")
                member.type, member.linkname = tarfile.SYMTYPE, link
                tar.addfile(member)
            for name in names:
                member = tarfile.TarInfo(name)
                member.size = len(name)
                tar.addfile(member, io.BytesIO(name.encode()))
    else:
        path.mkdir()
        for name in names:
            (path / pathlib.PurePath(name).name).write_text(name)
    return path


def install(settings: Settings, path: object = None) -> dict[str, str]:
    verb = verbs.ALL["env install"]
    with settings.workspace.claims:
        params = fields.parse(verb.options, {"wheelhouse": str(path)} if path else {})
        return texts_of(verb.do(settings, params, lambda _: None) or {})


@pytest.mark.parametrize("form", ["wheels", "w.tar", "w.tar.zst", "w.zip"])
def test_the_wheels_of_a_folder_or_an_archive_are_found(tmp_path: pathlib.Path, form: str):
    path = make(tmp_path / form.removesuffix(".zst"))
    if form.endswith(".zst"):
        subprocess.run(["zstd", "-q", path, "-o", f"{path}.zst"], check=True)
        path = tmp_path / form
    (folder,) = map(pathlib.Path, wheelhouse.unpack(str(path), tmp_path / "target"))
    assert {f"wheels/{wheel.name}": wheel.read_text() for wheel in folder.glob("*.whl")} == dict(
        zip(NAMES[1:], NAMES[1:], strict=True)
    )
    if path.is_file():
        path.write_bytes(path.read_bytes()[: min(700, path.stat().st_size // 2)])
        with pytest.raises(RefusedError, match=r" cannot be unpacked: \S"):
            wheelhouse.unpack(str(path), tmp_path / "other")


@pytest.mark.parametrize("form", ["bad.tar", "bad.zip"])
def test_no_member_of_an_archive_leads_out_of_the_folder(tmp_path: pathlib.Path, form: str):
    names = [
        "../evil.whl",
        "x/../../evil.whl",
        f"{tmp_path}/evil.whl",
        "link.whl/evil.whl",
        "good.whl",
    ]
    path = make(tmp_path / form, names, link=str(tmp_path))
    with contextlib.suppress(RefusedError):
        wheelhouse.unpack(str(path), tmp_path / "target")
    assert not (tmp_path / "evil.whl").exists()


def test_a_wheelhouse_replaces_all_indexes_and_an_attached_one_is_used_by_itself(
    settings: Settings, cluster: Cluster, pip: Pip, tmp_path: pathlib.Path
):
    attached = tmp_path / "attached"
    attached.touch()
    object.__setattr__(settings, "wheelhouse", attached)
    path = make(settings.workspace.path / "wheels")
    install(settings, path)
    installs = [call for call in pip.calls if "install" in call]
    assert len(installs) == 3, "of uv, the locked packages and torch"
    for call in installs:
        assert {"--no-index", "--only-binary=:all:", f"--find-links={path}"} <= set(call)
    assert not [name for name in pip.env if "INDEX_URL" in name or name == "UV_INDEX"]
    attached.write_bytes(make(tmp_path / "w.zip").read_bytes())
    (settings.payload / "requirements.txt").write_text("numpy==2.1\n")
    pip.calls.clear()
    install(settings)
    assert all("--no-index" in call for call in pip.calls if "install" in call)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("empty", "contains no .whl file"),
        ("notes.txt", "cannot be unpacked: "),
        ("away", "outside the workspace"),
        ("absent", "does not exist"),
        ("/etc", "is outside the workspace"),
    ],
)
def test_a_path_that_is_no_wheelhouse_is_refused(
    settings: Settings, cluster: Cluster, pip: Pip, tmp_path: pathlib.Path, name: str, why: str
):
    (settings.workspace.path / "empty").mkdir()
    (settings.workspace.path / "notes.txt").write_text("x")
    (settings.workspace.path / "away").symlink_to(tmp_path)
    with pytest.raises(Problem, match=why):
        install(settings, settings.workspace.path / name)
    assert not list(settings.workspace.environments.iterdir())
    assert not [call for call in pip.calls if "install" in call]
