"""The sandbox merges overlays exactly as Juju does: its reader against the rules of rules.py."""

import itertools
from typing import Any

import pytest
import rules

from sandbox import bundle as reader

NAMES = [path.stem for path in rules.OVERLAYS if path.stem != "cos"]  # offers of other models are beyond the sandbox
SETS = [
    names
    for count in range(3)
    for names in itertools.permutations(NAMES, count)
    if len({"cephfs", "lustre", "nfs"} & set(names)) <= 1  # the sandbox refuses to remove what is gone already
]


def as_read(path: Any) -> dict[str, Any]:
    return {name: {key: value for key, value in body.items() if value} for name, body in path.items()}


@pytest.mark.parametrize("names", SETS, ids="+".join)
def test_both_readers_agree(names: tuple[str, ...]):
    files = [rules.ROOT / "overlays" / f"{name}.yaml" for name in names]
    ours = reader.load(rules.BUNDLE, files)
    juju = rules.merge(rules.read(rules.BUNDLE), *(rules.read(file) for file in files))
    bodies = {
        name: {**app.body, "charm": juju["applications"][name]["charm"]} for name, app in ours.applications.items()
    }
    assert as_read(bodies) == as_read(juju["applications"])
    assert [list(relation.ends) for relation in ours.relations] == juju["relations"]


def test_charms_from_files_are_found_from_the_bundle_s_folder():
    for app in reader.load(rules.BUNDLE).applications.values():
        if app.is_local:
            assert app.charm == str(rules.ROOT / "dist" / app.charm.rsplit("/", 1)[-1])
