"""The generated reference pages are what the charms declare today."""

import pathlib

import pytest

from scripts import reference


@pytest.mark.parametrize("source", reference.charms(), ids=lambda path: path.parent.name)
def test_the_page_is_up_to_date(source: pathlib.Path):
    page = reference.page(source)
    assert page.is_file(), "run tox -e reference"
    assert page.read_text() == reference.render(source), "run tox -e reference"


def test_there_is_no_page_without_a_charm():
    assert {page.stem for page in reference.PAGES.glob("*.md")} == {path.parent.name for path in reference.charms()}


def test_everything_declared_is_on_the_page(tmp_path: pathlib.Path):
    source = tmp_path / "sample" / "charmcraft.yaml"
    source.parent.mkdir()
    source.write_text(
        """
name: sample
summary: A sample
description: It shows.
subordinate: true
platforms: {"ubuntu@24.04:amd64": null}
assumes: [juju >= 3.6]
provides: {out: {interface: thing, limit: 2, description: "Gives a|b\\n  things"}}
requires: {host: {interface: juju-info, scope: container, optional: false}}
config: {options: {level: {type: int, default: 3, description: How much}, ready: {type: boolean, default: false}}}
actions:
  go:
    description: Goes
    required: [where]
    params: {where: {type: string, enum: [here, there], description: Whither}, speed: {type: integer, minimum: 1, maximum: 9, default: 2}}
resources: {tool: {type: file, description: A tool}}
"""
    )
    assert reference.render(source) == (
        "<!-- Written by scripts/reference.py from charms/sample/charmcraft.yaml: change that one. -->\n"
        "# sample\n\nA sample\n\nIt shows.\n\nSubordinate charm; ubuntu@24.04; juju >= 3.6.\n\n"
        "## Endpoints\n\n| endpoint | role | interface | notes | what for |\n| --- | --- | --- | --- | --- |\n"
        "| `out` | provides | `thing` | limit 2 | Gives a\\|b things |\n"
        "| `host` | requires | `juju-info` | same machine; must be related |  |\n\n"
        "## Options\n\n| option | type | default | meaning |\n| --- | --- | --- | --- |\n"
        "| `level` | int | `3` | How much |\n| `ready` | boolean | `false` |  |\n\n"
        "## Actions\n\n### go\n\nGoes\n\n| parameter | type | default | meaning |\n| --- | --- | --- | --- |\n"
        "| `where` | string: `here`, `there` | required | Whither |\n| `speed` | integer, 1 to 9 | `2` |  |\n\n"
        "## Resources\n\n| name | type | what for |\n| --- | --- | --- |\n| `tool` | file | A tool |\n"
    )
