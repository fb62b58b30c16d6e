"""What the documents say can be typed: links resolve, commands and lanes exist, actions and options are declared."""

import configparser
import pathlib
import re
from typing import Any

import pytest
import rules
import yaml

PAGES = sorted(
    [*rules.ROOT.glob("*.md"), *(rules.ROOT / "docs").rglob("*.md"), *(rules.ROOT / "charms").glob("*/README.md")]
)
BUNDLE: dict[str, Any] = yaml.safe_load(rules.BUNDLE.read_text())


def named(path: pathlib.Path) -> str:
    return str(path.relative_to(rules.ROOT))


def declared(application: str) -> dict[str, Any] | None:
    """Return the charmcraft.yaml behind an application of the bundle; None for a charm that others publish."""
    charm = BUNDLE["applications"].get(application, {}).get("charm", "")
    path = rules.ROOT / "charms" / pathlib.PurePath(charm).stem / "charmcraft.yaml"
    return yaml.safe_load(path.read_text()) if charm.startswith(".") else None


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_links_resolve(page: pathlib.Path):
    prose = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for link in re.findall(r"\]\(([^)#]+)", prose):
        if "://" not in link:
            assert (page.parent / link).exists(), link


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_make_targets_exist(page: pathlib.Path):
    known = set(re.findall(r"^([a-z0-9.-]+):.*##", (rules.ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"(?:^|`)make ([a-z-]+(?:\d+\.\d+)?)", page.read_text(), re.MULTILINE)) <= known


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_lanes_exist(page: pathlib.Path):
    tox = configparser.ConfigParser()
    tox.read(rules.ROOT / "tox.ini")
    known = {section.removeprefix("testenv:") for section in tox.sections()}
    known |= {f"unit-{path.parent.name}" for path in (rules.ROOT / "charms").glob("*/charmcraft.yaml")}
    assert set(re.findall(r"tox -e ([a-z][a-z-]+(?:\d+\.\d+)?)", page.read_text())) <= known


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_actions_and_their_parameters_exist(page: pathlib.Path):
    for application, action, rest in re.findall(
        r"(?:juju|sandboxctl) run ([a-z-]+)/\d+(?: [a-z-]+/\d+)* ([a-z-]+)([^`\n|#]*)", page.read_text()
    ):
        charm = declared(application)
        if charm is None:
            continue
        assert action in charm.get("actions", {}), f"{application} has no action {action}"
        params = charm["actions"][action].get("params", {})
        for name, value in re.findall(r'(?:^|\s)([a-z][a-z-]+)=("[^"]*"|\S+)', rest):
            assert name in params, f"{action} has no parameter {name}"
            allowed = params[name].get("enum")
            assert allowed is None or value in allowed, f"{action} {name}={value}"


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_options_exist(page: pathlib.Path):
    text = page.read_text().replace("\\\n", " ")
    for application, rest in re.findall(r"(?:juju|sandboxctl) config ([a-z-]+)([^`\n|#]*)", text):
        charm = declared(application)
        if charm is None:
            continue
        for name in re.findall(r"(?:^|\s)([a-z][a-z-]+)=", rest):
            assert name in charm["config"]["options"], f"{application} has no option {name}"


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_endpoints_exist(page: pathlib.Path):
    charms = rules.upstream_charms() | rules.our_charms()
    for ends in re.findall(r"juju integrate ([a-z-]+:[a-z-]+) ([a-z-]+:[a-z-]+)", page.read_text()):
        for end in ends:
            name, _, endpoint = end.partition(":")
            charm = charms.get(BUNDLE["applications"].get(name, {}).get("charm", ""))
            assert charm is None or endpoint in charm.endpoints, end


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_commands_of_the_sandbox_exist(page: pathlib.Path):
    source = (rules.ROOT / "sandbox" / "cli.py").read_text()
    known = {
        name.rstrip("_").replace("_", "-")
        for name in re.findall(r"@cli\.command\([^)]*\)(?:\n.*?)*?\ndef (\w+)\(", source)
    }
    assert set(re.findall(r"\./sandboxctl ([a-z][a-z-]+)", page.read_text())) <= known


def test_every_overlay_is_in_the_readme():
    text = (rules.ROOT / "README.md").read_text()
    assert all(f"overlays/{path.name}" in text for path in rules.OVERLAYS)
