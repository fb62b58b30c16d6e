"""What a demo keeps of the one before it: the scripts that a host would run, run here on folders."""

import pathlib
import subprocess
import types
import typing

import pytest

from sandbox import demo, image
from sandbox.hosts import Hosts
from sandbox.store import Model

HOSTS = typing.cast(
    Hosts,
    types.SimpleNamespace(
        get=lambda host: types.SimpleNamespace(
            run=lambda argv, **_: subprocess.run(argv[argv.index("sh") :], check=True, cwd="/")
        )
    ),
)
MODEL = typing.cast(Model, types.SimpleNamespace(host_of=lambda unit: unit))


@pytest.fixture
def kept(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """Return the folder of what is kept; the workspace's is `store` beside it, which is not there yet."""
    folder = tmp_path / "kept"
    folder.mkdir()
    monkeypatch.setattr(image, "GUEST_ENVIRONMENTS", folder)
    monkeypatch.setattr(demo, "_STORE", str(tmp_path / "store"))
    return folder


def store(folder: pathlib.Path, name: str, text: str = "") -> str:
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.tar.zst").write_text(text or name)
    (folder / f"{name}.json").write_text("{}")
    return str(folder / f"{name}.tar.zst")


def content(folder: pathlib.Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.iterdir()}


def test_the_next_demo_gets_the_environment_of_the_one_before(kept: pathlib.Path, tmp_path: pathlib.Path):
    demo.offer_environment(HOSTS, MODEL)
    assert not (tmp_path / "store").exists(), "nothing is kept yet"
    demo.keep_environment(HOSTS, MODEL, store(tmp_path / "store", "aaaa"))
    made = content(tmp_path / "store")
    assert content(kept) == made
    (tmp_path / "store").rename(tmp_path / "gone")
    demo.offer_environment(HOSTS, MODEL)
    assert content(tmp_path / "store") == made


def test_what_is_in_the_workspace_stays_as_it_is(kept: pathlib.Path, tmp_path: pathlib.Path):
    store(kept, "aaaa", "of before")
    store(tmp_path / "store", "aaaa", "of now")
    demo.offer_environment(HOSTS, MODEL)
    assert content(tmp_path / "store")["aaaa.tar.zst"] == "of now"


def test_of_several_demos_the_last_environment_is_kept(kept: pathlib.Path, tmp_path: pathlib.Path):
    for name in ("aaaa", "bbbb", "bbbb"):
        demo.keep_environment(HOSTS, MODEL, store(tmp_path / "store", name))
    assert sorted(content(kept)) == ["bbbb.json", "bbbb.tar.zst"]
