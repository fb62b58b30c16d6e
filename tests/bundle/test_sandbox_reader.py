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
        file.write_text(rules.filled(rules.ROOT / "overlays" / file.name))
    ours = reader.load(rules.BUNDLE, files)
    juju = rules.merge(rules.read(rules.BUNDLE), *(rules.read(file) for file in files))
    bodies = {
        name: {**app.body, "charm": juju["applications"][name]["charm"]} for name, app in ours.applications.items()
    }
    assert as_read(bodies) == as_read(juju["applications"])
    assert [list(relation.ends) for relation in ours.relations] == juju["relations"]


@pytest.mark.parametrize("name", ["cephfs", "gpu", "lustre", "nfs"])
def test_what_is_not_filled_in_is_reported_with_its_line(name: str):
    file = rules.ROOT / "overlays" / f"{name}.yaml"
    with pytest.raises(
        reader.BundleError, match=rf"^{name}.yaml line \d+: is not filled in yet: put a value in the place of"
    ):
        reader.load(rules.BUNDLE, [file])


@pytest.mark.parametrize("name", ["gpu", "lxd"])
def test_what_only_a_cloud_can_give_is_refused_by_name(name: str, tmp_path: pathlib.Path):
    file = tmp_path / f"{name}.yaml"
    file.write_text(rules.filled(rules.ROOT / "overlays" / file.name))
    defaults = rules.ROOT / "sandbox" / "overlay.yaml"
    with pytest.raises(
        reader.BundleError, match=rf"^{name}.yaml line \d+: .*constraints.* hosts are containers on this machine"
    ):
        reader.load(rules.BUNDLE, [file], defaults)


def test_another_base_is_refused_by_name():
    file, defaults = rules.ROOT / "overlays" / "2604.yaml", rules.ROOT / "sandbox" / "overlay.yaml"
    text = (
        r"application 'slurmctld': base 'ubuntu@26.04' is for Juju's machines; the sandbox's hosts all have one base: "
    )
    with pytest.raises(reader.BundleError, match=rf"^2604.yaml line 10: {text}leave this overlay out here$"):
        reader.load(rules.BUNDLE, [file], defaults)


def test_machines_that_exist_are_refused_by_name():
    with pytest.raises(
        reader.BundleError, match=r"^machines.yaml line \d+: the sandbox gives every unit a host of its own"
    ):
        reader.load(rules.BUNDLE, [rules.ROOT / "overlays" / "machines.yaml"])


def test_charms_from_files_are_found_from_the_bundle_s_folder():
    for app in reader.load(rules.BUNDLE).applications.values():
        if app.is_local:
            assert app.charm == str(rules.ROOT / "dist" / app.charm.rsplit("/", 1)[-1])
