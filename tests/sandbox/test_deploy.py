"""From a bundle to a model: idempotent, upgrading what changed, touching nothing when the bundle is wrong."""

import pathlib

import pytest
import yaml

from sandbox import bundle as bundles
from sandbox import deploy as deployment
from sandbox import gpus as mock_gpus
from sandbox import settings
from sandbox.engine import Engine, Progress
from sandbox.gpus import Gpu
from sandbox.store import Model, SandboxError, Store

CASES = yaml.safe_load(pathlib.Path(__file__).with_suffix(".yaml").read_text())

METADATA = """
name: thing
type: charm
provides: {api: {interface: http}}
requires: {web: {interface: http}}
resources: {tool: {type: file}}
config: {options: {port: {type: int, default: 80}, token: {type: secret}}}
"""
BUNDLE = """
applications:
  thing: {charm: ./thing, num_units: 1, options: {port: 81}, resources: {tool: ./tool}}
  other: {charm: ./thing, num_units: 2}
relations:
  - [thing:api, other:web]
"""


class Bench:
    """A bundle in a folder, and a model that it is deployed into."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder = folder
        (folder / "thing" / "src").mkdir(parents=True)
        (folder / "thing" / "charmcraft.yaml").write_text(METADATA)
        (folder / "thing" / "src" / "charm.py").write_text("one")
        (folder / "tool").write_text("tool 1")
        (folder / "bundle.yaml").write_text(BUNDLE)
        self.engine = Engine(Store("t", folder / "state"), Progress(print))
        self.engine.model = self.model = Model(name="t")

    def deploy(self) -> list[str]:
        """Deploy; return the newly queued events, and forget them."""
        deployment.apply(self.engine, bundles.load(self.folder / "bundle.yaml"))
        queued = [
            f"{unit.name} {event.label}"
            for unit in self.model.units.values()
            for event in unit.events
        ]
        for unit in self.model.units.values():
            unit.events.clear()
        return queued


@pytest.fixture
def bench(tmp_path: pathlib.Path) -> Bench:
    return Bench(tmp_path)


def test_units_relations_options_and_resources_come_from_the_bundle(bench: Bench):
    queued = bench.deploy()
    assert list(bench.model.units) == ["thing/0", "other/0", "other/1"]
    assert queued[:3] == [
        "thing/0 install",
        "thing/0 api-relation-created",
        "thing/0 leader-elected",
    ]
    thing = bench.model.applications["thing"]
    assert settings.options(thing) == {"port": 81}
    assert pathlib.Path(thing.resources["tool"]).read_text() == "tool 1"
    assert (pathlib.Path(thing.source) / "src" / "charm.py").read_text() == "one"
    before = bench.model.model_dump()
    assert bench.deploy() == [], "the same bundle again changes nothing"
    assert bench.model.model_dump() == before


def test_a_second_deploy_applies_the_differences(bench: Bench):
    bench.deploy()
    bench.folder.joinpath("bundle.yaml").write_text(
        BUNDLE.replace("81", "82").replace("num_units: 2", "num_units: 3")
    )
    bench.folder.joinpath("thing", "src", "charm.py").write_text("two")
    bench.folder.joinpath("tool").write_text("tool 2")
    queued = bench.deploy()
    assert queued[:3] == [
        "thing/0 config-changed",
        "thing/0 upgrade-charm",
        "other/0 upgrade-charm",
    ]
    assert "other/2 install" in queued
    thing = bench.model.applications["thing"]
    assert (thing.revision, settings.options(thing)["port"]) == (1, 82)
    assert (pathlib.Path(thing.source) / "src" / "charm.py").read_text() == "two"
    assert pathlib.Path(thing.resources["tool"]).read_text() == "tool 2"


@pytest.mark.parametrize(("old", "new", "message"), CASES["a_wrong_bundle_changes_nothing"])
def test_a_wrong_bundle_changes_nothing(bench: Bench, old: str, new: str, message: str):
    bench.folder.joinpath("bundle.yaml").write_text(BUNDLE.replace(old, new))
    with pytest.raises(SandboxError) as error:
        bench.deploy()
    assert str(error.value).startswith(message)
    assert bench.model.applications == {}


@pytest.mark.parametrize(
    ("text", "gpus"),
    [
        ("", ()),
        ("0", ()),
        ("2 x Mock GPU", (Gpu("Mock GPU"), Gpu("Mock GPU"))),
        (
            "NVIDIA L40S, Tesla T4, 1 x NVIDIA L40S",
            (Gpu("NVIDIA L40S"), Gpu("Tesla T4"), Gpu("NVIDIA L40S")),
        ),
        ("2 x H200 @ 0, empty,H200 @ 1", (Gpu("H200", 0), Gpu("H200", 0), Gpu(""), Gpu("H200", 1))),
        *((wrong, None) for wrong in ("2", "2 x", "0 x A", "A,", "A @ x", "A @ 12", "-1 x A")),
    ],
)
def test_mock_gpus_are_asked_for_by_annotation(text: str, gpus: tuple[Gpu, ...] | None):
    if gpus is not None:
        assert mock_gpus.parse(text) == gpus
        return
    with pytest.raises(SandboxError, match="write '2 x Mock GPU', "):
        mock_gpus.parse(text)


def test_juju_4_finds_no_local_charm_for_a_bundle_without_arch_once_it_is_deployed(bench: Bench):
    bench.model.juju = "4"
    bench.deploy()
    assert bench.model.applications["thing"].constraints == "arch=amd64", "Juju adds it"
    with pytest.raises(
        SandboxError, match=r"^cannot deploy local charm at /.*/thing: file does not exist$"
    ):
        bench.deploy()
    named = BUNDLE.replace("num_units:", "constraints: arch=amd64, num_units:")
    bench.folder.joinpath("bundle.yaml").write_text(named)
    before = bench.model.model_dump()
    assert bench.deploy() == []
    assert bench.model.model_dump() == before


def test_juju_3_6_adds_no_constraint_and_takes_the_bundle_again(bench: Bench):
    bench.deploy()
    assert bench.model.applications["thing"].constraints == ""
    assert bench.deploy() == []


def test_a_subordinate_has_no_constraints(bench: Bench):
    (bench.folder / "thing" / "charmcraft.yaml").write_text(METADATA + "subordinate: true\n")
    body = "applications:\n  thing: {charm: ./thing, constraints: arch=amd64}\n"
    bench.folder.joinpath("bundle.yaml").write_text(body)
    with pytest.raises(SandboxError, match=r"^thing is subordinate: it has no constraints$"):
        bench.deploy()


def test_the_bundle_of_26_04_is_staged_and_its_stand_ins_have_their_base(tmp_path: pathlib.Path):
    root = deployment.REPOSITORY
    merged = bundles.load(root / "bundle.yaml", [root / "overlays" / "2604.yaml"])
    for name in ("slurmd", "mysql", "trainer"):
        deployment.stage(merged.applications[name], tmp_path / name)
    assert (tmp_path / "slurmd" / "base").read_text() == "ubuntu@26.04"
    assert (tmp_path / "mysql" / "base").read_text() == "ubuntu@22.04"
    assert (tmp_path / "trainer" / "src" / "charm.py").is_file()
