"""A wheelhouse: a folder or an archive of wheels, for clusters that reach no package index."""

import contextlib
import pathlib
import subprocess
import tarfile
import zipfile

import pytest
from cluster import Cluster
from pip_double import Pip
from wheelhouses import WHEELS, add, make

from ddp import verbs
from ddp.base import ParameterError, Settings, texts_of
from ddp.environment import wheelhouse
from ddp.options import fields
from ddp.workspace.files import RefusedError


def install(settings: Settings, path: object = None) -> dict[str, str]:
    verb = verbs.ALL["env install"]
    with settings.claims:
        params = fields.parse(verb.options, {"wheelhouse": str(path)} if path else {})
        return texts_of(verb.do(settings, params, lambda _: None) or {})


def refusal(settings: Settings, path: object) -> str:
    with pytest.raises(ParameterError, match=r"^wheelhouse: ") as caught:
        install(settings, path)
    return str(caught.value)


def installs(pip: Pip) -> list[tuple[str, ...]]:
    return [call for call in pip.calls if "install" in call]


@pytest.mark.parametrize("form", ["", ".tar", ".tar.zst", ".zip"])
def test_the_wheels_are_unpacked_into_one_folder(tmp_path: pathlib.Path, form: str):
    path = make(tmp_path, ".tar" if form == ".tar.zst" else form)
    if form == ".tar.zst":
        subprocess.run(["zstd", "-q", path, "-o", f"{path}.zst"], check=True)
        path = f"{path}.zst"
    folder = pathlib.Path(wheelhouse.unpack(path, str(tmp_path / "target")))
    assert {wheel.name: wheel.read_bytes() for wheel in folder.glob("*.whl")} == WHEELS
    if form:
        packed = pathlib.Path(path).read_bytes()
        pathlib.Path(path).write_bytes(packed[: len(packed) // 2])
        with pytest.raises(RefusedError, match=r" cannot be unpacked: \S"):
            wheelhouse.unpack(path, str(tmp_path / "other"))


def test_no_index_is_asked(settings: Settings, cluster: Cluster, pip: Pip):
    results = install(settings, make(settings.workspace, ""))
    assert len(installs(pip)) == 3, "of uv, the locked packages and torch"
    for call in installs(pip):
        assert {"--no-index", "--only-binary=:all:", f"--find-links={settings.workspace}/wheels"} <= set(call)
    assert not [name for name in pip.env if "INDEX_URL" in name or name == "UV_INDEX"]
    assert len(results["wheelhouse"]) == 16


def test_an_attached_wheelhouse_is_used_by_itself(
    settings: Settings, cluster: Cluster, pip: Pip, tmp_path: pathlib.Path
):
    attached = tmp_path / "wheelhouse"
    attached.touch()
    object.__setattr__(settings, "wheelhouse", attached)
    assert "wheelhouse" not in install(settings), "an empty file is none"
    pip.calls.clear()
    attached.write_bytes(pathlib.Path(make(settings.workspace, ".zip")).read_bytes())
    results = install(settings)
    assert all("--no-index" in call for call in installs(pip))
    assert install(settings, f"{settings.workspace}/wheels.zip") == results, "the same wheels"
    assert len(installs(pip)) == 3
    attached.write_bytes(b"no archive at all" * 100)
    with pytest.raises(ParameterError, match=r"^wheelhouse: .* cannot be unpacked: "):
        install(settings)


def test_other_wheels_make_another_environment(settings: Settings, cluster: Cluster, pip: Pip):
    path = make(settings.workspace, "")
    first = install(settings, path)
    calls = len(pip.calls)
    assert install(settings, path) == first
    assert len(pip.calls) == calls
    (pathlib.Path(path) / "numpy-2.0-py3-none-any.whl").write_bytes(b"repaired")
    assert install(settings, path)["wheelhouse"] != first["wheelhouse"]


@pytest.mark.parametrize("form", ["tar", "zip"])
def test_no_member_of_an_archive_leads_out_of_the_folder(tmp_path: pathlib.Path, form: str):
    names = ["../evil.whl", "x/../../evil.whl", f"{tmp_path}/evil.whl", "good.whl"]
    path = tmp_path / f"bad.{form}"
    if form == "zip":
        with zipfile.ZipFile(path, "w") as zipped:
            for name in names:
                zipped.writestr(zipfile.ZipInfo(name), "x")
            link = zipfile.ZipInfo("link")
            link.external_attr = 0o120777 << 16
            zipped.writestr(link, str(tmp_path))
            zipped.writestr("link/evil.whl", "x")
    else:
        with tarfile.open(path, "w") as tar:
            add(tar, "link", b"", type=tarfile.SYMTYPE, linkname=str(tmp_path))
            for name in [*names, "link/evil.whl"]:
                add(tar, name)
    with contextlib.suppress(RefusedError):
        wheelhouse.unpack(str(path), str(tmp_path / "target"))
    assert not (tmp_path / "evil.whl").exists()


def test_a_link_in_an_archive_is_no_wheel(tmp_path: pathlib.Path):
    with tarfile.open(tmp_path / "w.tar", "w") as tar:
        add(tar, "passwd.whl", b"", type=tarfile.SYMTYPE, linkname="/etc/passwd")
        add(tar, "good.whl")
    folder = wheelhouse.unpack(str(tmp_path / "w.tar"), str(tmp_path / "target"))
    assert [path.name for path in pathlib.Path(folder).iterdir()] == ["good.whl"]


def test_a_path_that_is_no_wheelhouse_is_refused(
    settings: Settings, cluster: Cluster, pip: Pip, tmp_path: pathlib.Path
):
    top = settings.workspace
    (top / "empty").mkdir()
    (top / "notes.txt").write_text("x")
    (top / "away").symlink_to(tmp_path)
    for path, why in {
        top / "empty": "contains no .whl file",
        top / "notes.txt": "cannot be unpacked: ",
        top / "away": "outside the workspace",
        top / "absent": "does not exist",
        "/etc": "is outside the workspace",
    }.items():
        assert why in refusal(settings, path)
    assert not list(settings.environments.iterdir())
    assert not installs(pip)
