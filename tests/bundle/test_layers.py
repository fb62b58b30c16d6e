"""The page on architecture shows the rooms of lib/ddp in the order that import-linter holds them to."""

import re
import tomllib

import rules


def test_the_page_shows_the_rooms_from_the_top_down():
    pyproject = tomllib.loads((rules.ROOT / "pyproject.toml").read_text())
    layers = pyproject["tool"]["importlinter"]["contracts"][0]["layers"]
    page = (rules.ROOT / "docs" / "explanation" / "architecture.md").read_text()
    table = page.partition("| room | one idea |")[2].partition("\n\n")[0]
    shown = [
        re.findall(r"`([a-z]+)`", row.split("|")[1])
        for row in table.splitlines()
        if row.startswith("| `")
    ]
    assert shown == [re.findall(r"ddp\.([a-z]+)", layer) for layer in layers]


def test_every_room_is_a_layer():
    pyproject = tomllib.loads((rules.ROOT / "pyproject.toml").read_text())
    layers = " ".join(pyproject["tool"]["importlinter"]["contracts"][0]["layers"])
    found = {
        path.stem
        for path in (rules.ROOT / "lib" / "ddp").iterdir()
        if path.suffix == ".py" or path.is_dir()
    }
    found -= {"__init__", "__main__", "__pycache__"}
    assert found == set(re.findall(r"ddp\.([a-z]+)", layers))
