"""Everything in the documents can be typed: links, commands, lanes, actions and options exist.

Their Slurm settings go through slurmutils, as in upstream's charms.
"""

import configparser
import functools
import pathlib
import re
import shlex
from typing import Any

import deployments
import pytest
import slurmutils
import yaml
from documents import ANYWHERE, CHARMS, PAGES, SOURCES, actions_typed, named, settings

from sandbox import bundle as bundles
from sandbox import settings as operator
from sandbox.store import Application
from scripts import programs, reference

BUNDLE: dict[str, Any] = yaml.safe_load(deployments.BUNDLE.read_text())


@functools.cache
def declared(application: str) -> dict[str, Any] | None:
    """Return the charmcraft.yaml behind an application of the bundle; None for a charm that others publish."""
    charm = BUNDLE["applications"].get(application, {}).get("charm", "")
    path = deployments.ROOT / "charms" / pathlib.PurePath(charm).stem / "charmcraft.yaml"
    return yaml.safe_load(path.read_text()) if charm.startswith(".") else None


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_links_resolve(page: pathlib.Path):
    prose = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for link in re.findall(r"\]\(([^)#]+)", prose):
        if "://" not in link:
            assert (page.parent / link).exists(), link


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_code_fits_its_box(page: pathlib.Path):
    blocks = re.findall(r"^ *```(\w*)\n(.*?)^ *```$", page.read_text(), re.MULTILINE | re.DOTALL)
    assert [
        line
        for kind, block in blocks
        if kind != "mermaid"
        for line in block.splitlines()
        if len(line) > 84
    ] == []


def test_scripts_on_nccl_keep_model_and_data_on_the_gpu_of_their_rank():
    blocks = [
        re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
        for page in PAGES
    ]
    scripts = [block for found in blocks for block in found if '"nccl"' in block]
    needed = (r"set_device\(.*LOCAL_RANK", r"nn\.\w+\(.*\.to\(device\)", r"randn\(.*device\b")
    assert scripts
    assert [
        (script, piece) for script in scripts for piece in needed if not re.search(piece, script)
    ] == []


def commands() -> dict[str, set[str]]:
    """Return the known names by the words before them: make targets, lanes, sandbox commands."""
    tox = configparser.ConfigParser()
    tox.read(deployments.ROOT / "tox.ini")
    sections = {section.removeprefix("testenv:") for section in tox.sections()}
    lanes = sections | {re.sub(r"\{,[^}]*\}", "", section) for section in sections}
    source = (deployments.ROOT / "sandbox" / "cli.py").read_text()
    sandbox = re.findall(r"@cli\.command\([^)]*\)(?:\n.*?)*?\ndef (\w+)\(", source)
    return {
        r"(?:^|`)make": set(
            re.findall(
                r"^([a-z0-9.-]+):.*##", (deployments.ROOT / "Makefile").read_text(), re.MULTILINE
            )
        ),
        r"tox -e": lanes
        | {
            f"unit-{path.parent.name}"
            for path in (deployments.ROOT / "charms").glob("*/charmcraft.yaml")
        },
        r"\./sandboxctl": {name.rstrip("_").replace("_", "-") for name in sandbox},
    }


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_commands_exist(page: pathlib.Path):
    for before, known in commands().items():
        assert (
            set(
                re.findall(rf"{before} ([a-z][a-z-]+(?:\d+\.\d+)?)", page.read_text(), re.MULTILINE)
            )
            <= known
        )


TYPED = [*PAGES, *CHARMS, deployments.ROOT / "sandbox" / "demo.py"]


@pytest.mark.parametrize("source", TYPED, ids=named)
def test_juju_accepts_every_action_that_is_typed(source: pathlib.Path):
    for application, action, words in actions_typed(source.read_text()):
        charm = declared(application)
        if charm is not None:
            app = Application(name=application, charm=charm["name"], source="", metadata=charm)
            operator.action_params(app, action, dict(word.split("=", 1) for word in words))


def test_the_actions_that_are_typed_are_found():
    found = [call for source in TYPED for call in actions_typed(source.read_text())]
    assert len(found) > 60
    assert {"branch=580", "time-limit=30", "profiles=1g.5gb x7"} <= {
        word for *_, words in found for word in words
    }


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
    for ends in re.findall(r"juju integrate ([a-z-]+:[a-z-]+) ([a-z-]+:[a-z-]+)", page.read_text()):
        for end in ends:
            name, _, endpoint = end.partition(":")
            if charm := BUNDLE["applications"].get(name, {}).get("charm"):
                declared = deployments.declaration(pathlib.PurePath(charm).stem)
                assert endpoint in bundles.endpoints_of(declared), end


def test_the_charms_pages_are_what_they_declare():
    wanted = {reference.page(source): reference.render(source) for source in reference.charms()}
    assert {page: page.read_text() for page in reference.PAGES.glob("*.md")} == wanted, (
        "run tox -e reference"
    )


def test_the_page_of_programs_is_what_their_tests_left():
    assert programs.PAGE.read_text() == programs.render(), "run tox -e reference"


def test_every_overlay_is_in_the_readme():
    text = (deployments.ROOT / "README.md").read_text()
    assert all(f"overlays/{path.name}" in text for path in deployments.OVERLAYS)


@pytest.mark.parametrize("source", SOURCES, ids=named)
def test_slurm_s_options_take_what_is_set(source: pathlib.Path):
    found = [
        problem
        for option, value in settings(source.read_text())
        for problem in ANYWHERE[option](value)
    ]
    assert found == []


@pytest.mark.parametrize("source", SOURCES, ids=named)
def test_nodes_take_what_set_node_config_is_given(source: pathlib.Path):
    for value in re.findall(
        r"set-node-config parameters=('[^']*'|\"[^\"]*\"|\S+)", source.read_text()
    ):
        slurmutils.Node.from_str(" ".join(shlex.split(value)))


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_what_is_deployed_from_charmhub_is_published_there(page: pathlib.Path):
    text = page.read_text().replace("\\\n", " ")
    known = deployments.facts()["charms"]
    for charm, rest in re.findall(r"juju deploy ([a-z][a-z-]+)([^`\n]*)", text):
        channel, base = (re.search(rf"--{option} (\S+)", rest) for option in ("channel", "base"))
        if charm in known and channel and base:
            published = known[charm]["channels"].get(channel[1], [])
            assert base[1] in published, f"{charm} {channel[1]} {base[1]}"


@pytest.mark.parametrize("page", [*PAGES, deployments.ROOT / "scripts" / "deploy.sh"], ids=named)
def test_what_juju_4_dropped_is_never_typed(page: pathlib.Path):
    """`juju wait-for` and `juju status --watch` were removed in 4.0 and 4.0.1 (juju/juju#21692)."""
    assert not re.findall(r"juju (?:wait-for\b.*|status\b[^|`\n]* --watch\b.*)", page.read_text())


def test_every_picture_exists_is_small_and_is_shown():
    link = re.compile(r"(?:!\[[^\]]*\]\(|<img src=\")([^)\"]+)")
    shown = {
        (page.parent / path).resolve() for page in PAGES for path in link.findall(page.read_text())
    }
    images = deployments.ROOT / "docs" / "images"
    assert shown == set(images.iterdir()), "docs/images differs from the pictures that pages show"
    assert [path.name for path in shown if path.stat().st_size > 300_000] == []
