"""The sandbox merges overlays exactly as Juju does: its reader against the rules of rules.py."""

import itertools
import pathlib
from typing import Any

import pytest
import rules

from sandbox import bundle as reader

# Offers of other models, machines that exist, and what only a Juju that is not here needs are beyond the sandbox.
NAMES = [path.stem for path in rules.OVERLAYS if path.stem not in {"cos", "machines", "juju4", "2604"}]
SETS = [
    names
    for count in range(3)
    for names in itertools.permutations(NAMES, count)
    if len({"cephfs", "lustre", "nfs"} & set(names)) <= 1  # the sandbox refuses to remove what is removed already
]


def as_read(path: Any) -> dict[str, Any]:
    return {name: {key: value for key, value in body.items() if value} for name, body in path.items()}


@pytest.mark.parametrize("names", SETS, ids="+".join)
def test_both_readers_agree(names: tuple[str, ...], tmp_path: pathlib.Path):
    files = [tmp_path / f"{name}.yaml" for name in names]
    for file in files:
        text = rules.filled(rules.ROOT / "overlays" / file.name)
        file.write_text(text.replace("../dist/", f"{rules.ROOT}/dist/"))
    ours = reader.load(rules.BUNDLE, files)
    juju = rules.merge(rules.read(rules.BUNDLE), *(rules.read(file) for file in files))
    bodies = {
        name: {**app.body, "charm": juju["applications"][name]["charm"]} for name, app in ours.applications.items()
    }
    assert as_read(bodies) == as_read(juju["applications"])
    assert [list(ends) for ends in ours.relations] == juju["relations"]
