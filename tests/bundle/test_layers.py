"""The page on architecture shows the rooms of lib/ddp and of the payload in the order that import-linter holds them to."""

import re
import tomllib

import deployments
import pytest

CONTRACTS = tomllib.loads((deployments.ROOT / "pyproject.toml").read_text())["tool"][
    "importlinter"
]["contracts"]
LAYERS = {one["name"]: one["layers"] for one in CONTRACTS if one["type"] == "layers"}


@pytest.mark.parametrize(
    ("contract", "package", "head"),
    [
        ("The rooms of lib/ddp", "ddp", "| room | one idea |"),
        ("The rooms of payload/ddptrain", "ddptrain", "| part | one idea |"),
    ],
)
def test_the_page_shows_the_rooms_from_the_top_down(contract: str, package: str, head: str):
    page = (deployments.ROOT / "docs" / "explanation" / "architecture.md").read_text()
    table = page.partition(head)[2].partition("\n\n")[0]
    shown = [
        re.findall(r"`([a-z_]+)`", row.split("|")[1])
        for row in table.splitlines()
        if row.startswith("| `")
    ]
    assert shown == [re.findall(rf"{package}\.([a-z_]+)", layer) for layer in LAYERS[contract]]


@pytest.mark.parametrize(
    ("contract", "folder"),
    [("The rooms of lib/ddp", "lib/ddp"), ("The rooms of payload/ddptrain", "payload/ddptrain")],
)
def test_every_room_is_a_layer(contract: str, folder: str):
    layers = " ".join(LAYERS[contract])
    found = {
        path.stem
        for path in (deployments.ROOT / folder).iterdir()
        if path.suffix == ".py" or path.is_dir()
    }
    found -= {"__init__", "__main__", "__pycache__"}
    assert found == set(re.findall(r"\w+\.([a-z_]+)", layers))
