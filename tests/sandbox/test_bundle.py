"""Reading, merging and checking bundles: each mistake is named."""

import pathlib
import typing

import pytest
import yaml

from sandbox import bundle as bundles
from sandbox.store import SandboxError

SERVER: dict[str, typing.Any] = {
    "provides": {"api": {"interface": "http"}},
    "resources": {"tool": {"type": "file"}},
    "config": {
        "options": {
            "port": {"type": "int", "default": 80},
            "name": {"type": "string"},
            "color": {"type": "string", "description": bundles.NOT_PLAYED},
        }
    },
}
METADATA: dict[str, dict[str, typing.Any]] = {
    "server": SERVER,
    "client": {"requires": {"api": {"interface": "http"}, "db": {"interface": "sql"}}},
    "agent": {
        "subordinate": True,
        "requires": {"juju-info": {"interface": "juju-info", "scope": "container"}},
    },
}
BUNDLE = pathlib.Path(__file__).with_suffix(".yaml").read_text()


def load(tmp_path: pathlib.Path, text: str, overlay: str = "") -> bundles.Bundle:
    (tmp_path / "overlays").mkdir()
    files = tmp_path / "bundle.yaml", tmp_path / "overlays" / "overlay.yaml"
    for file, content in zip(files, (text, overlay), strict=True):
        file.write_text(content)
    return bundles.load(files[0], files[1:])


def test_paths_are_relative_to_the_file_that_names_them(tmp_path: pathlib.Path):
    (tmp_path / "tool").write_text("")
    bundle = load(tmp_path, BUNDLE, "applications:\n  server:\n    resources: {tool: ../tool}\n")
    assert bundle.applications["server"].body["resources"] == {"tool": str(tmp_path / "tool")}
    assert bundle.applications["client"].charm == str(tmp_path / "dist" / "client.charm")
    assert not bundle.applications["server"].is_local
    bundles.check(bundle, METADATA)


MISTAKES: list[dict[str, str]] = yaml.safe_load(
    (pathlib.Path(__file__).parent / "mistakes.yaml").read_text()
)


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake["new"])
def test_a_mistake_is_named(tmp_path: pathlib.Path, mistake: dict[str, str]):
    assert mistake["old"] in BUNDLE
    text = BUNDLE.replace(mistake["old"], mistake["new"], 1)
    with pytest.raises(SandboxError) as error:
        bundle = load(tmp_path, text)
        bundles.check(bundle, METADATA)
        bundles.check_playable(bundle)
    assert str(error.value) == mistake["message"]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("", "no application 'sever' to remove"),
        ("{num_units: 2}", "application 'sever' has no charm, and the bundle lacks it"),
    ],
)
def test_an_application_that_an_overlay_misspells_is_named(
    tmp_path: pathlib.Path, body: str, message: str
):
    with pytest.raises(SandboxError, match=f"overlay.yaml: {message}: did you mean 'server'"):
        load(tmp_path, BUNDLE, f"applications:\n  sever: {body}\n")
