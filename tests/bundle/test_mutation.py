"""The scores of mutation testing: every module of the table has one that is kept, and it is high enough."""

import pathlib
import tomllib
import typing

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
TABLE = tomllib.loads((ROOT / "tests/mutation/modules.toml").read_text())
SCORES = {row["path"]: row for row in tomllib.loads((ROOT / "tests/mutation/scores.toml").read_text())["module"]}
LEAST = 85.0


def test_every_module_has_a_score_and_no_other():
    assert set(SCORES) == {row["path"] for row in TABLE["module"]}


@pytest.mark.parametrize("row", TABLE["module"], ids=lambda row: row["path"])
def test_a_module_is_tested_well_enough(row: dict[str, typing.Any]):
    score = SCORES[row["path"]]
    assert score["score"] == round(100 * score["killed"] / score["mutants"], 1)
    assert score["score"] >= LEAST, f"make mutants shows what no test of {row['path']} notices"


@pytest.mark.parametrize("row", TABLE["module"], ids=lambda row: row["path"])
def test_the_table_names_what_is_there(row: dict[str, typing.Any]):
    source = (ROOT / row["path"]).read_text()
    assert row["lane"] in TABLE["lanes"]
    assert all((ROOT / path).is_file() for path in row["tests"])
    for one in row.get("equivalent", []):
        assert one["why"]
        assert all(line in source for line in one["removed"].split("\n")), f"no such line: {one['removed']}"
