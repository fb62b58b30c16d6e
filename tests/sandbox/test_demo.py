"""The reuse of an earlier demo's environment: a host's scripts, run here on folders."""

import pathlib
import subprocess
import types
import typing

import pytest

from sandbox import demo, image
from sandbox.hosts import Hosts
from sandbox.store import Model


class Host:
    """A host whose files are this machine's."""

    def run(self, argv: list[str], **_: object) -> None:
        subprocess.run(argv[argv.index("sh") :], check=True, cwd="/")


HOSTS = typing.cast(Hosts, types.SimpleNamespace(get=lambda _: Host()))
MODEL = typing.cast(Model, types.SimpleNamespace(host_of=lambda unit: unit))


def content(folder: pathlib.Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.iterdir()} if folder.exists() else {}


def test_the_next_demo_gets_the_last_environment_and_changes_none(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    kept, store = tmp_path / "kept", tmp_path / "store"
    kept.mkdir()
    monkeypatch.setattr(image, "GUEST_ENVIRONMENTS", kept)
    monkeypatch.setattr(demo, "_STORE", str(store))
    demo.offer_environment(HOSTS, MODEL)
    assert not store.exists(), "nothing is kept yet"
    store.mkdir()
    for name in ("aaaa", "bbbb", "bbbb"):
        (store / f"{name}.tar.zst").write_text(f"{name} 1")
        (store / f"{name}.json").write_text("{}")
        demo.keep_environment(HOSTS, MODEL, str(store / f"{name}.tar.zst"))
    last = {"bbbb.json": "{}", "bbbb.tar.zst": "bbbb 1"}
    assert content(kept) == last
    store.rename(tmp_path / "gone")
    demo.offer_environment(HOSTS, MODEL)
    assert content(store) == last
    (store / "bbbb.tar.zst").write_text("bbbb 2")
    demo.offer_environment(HOSTS, MODEL)
    assert content(store) == last | {"bbbb.tar.zst": "bbbb 2"}
