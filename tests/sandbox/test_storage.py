"""Juju's storage: kept storage of removed units, its next owner, and refusals."""

import pathlib
import typing

import pytest
from world import World

from sandbox import model as rules
from sandbox import storage, view
from sandbox.store import SandboxError, Status, Storage, Store

DISK: dict[str, typing.Any] = {"name": "disk", "storage": {"volume": {"type": "filesystem"}}}


def remove(world: World, *, destroy: bool = False) -> None:
    if destroy:
        storage.destroy_with(world.model, world.model.app_units("disk"))
    rules.remove_applications(world.model, ["disk"])
    world.settle()


def test_storage_outlives_its_unit_and_goes_to_another_one(world: World, tmp_path: pathlib.Path):
    app = world.add("disk", DISK)
    assert world.ran == []
    world.settle()
    assert world.ran[:2] == ["disk/0 storage-attached", "disk/0 install"]
    assert "disk/0" in storage.as_text(world.model)
    remove(world)
    kept = world.model.storage["volume/0"]
    assert (kept.unit, kept.machine) == (None, 0)
    assert storage.as_text(world.model).splitlines()[1].split() == [
        "volume/0",
        "filesystem",
        "detached",
    ]

    store, roots = Store("t", tmp_path), [tmp_path / "old", tmp_path / "new"]
    file = roots[0] / "var/lib/juju/storage/volume-0/file"
    file.parent.mkdir(parents=True)
    file.write_text("kept")
    with pytest.raises(SandboxError, match="still being detached"):
        rules.add_unit(world.model, app, attach=["volume/0"])
    storage.keep(store, world.model, 0, roots[0])
    rules.add_application(world.model, app)
    unit = rules.add_unit(world.model, app, attach=["volume/0"])
    assert unit.name == "disk/1", "Juju goes on counting"
    assert unit.storages == [("volume", 0)]
    storage.bring(store, world.model, unit.machine, roots[1])
    assert (roots[1] / "var/lib/juju/storage/volume-0/file").read_text() == "kept"
    assert not (store.directory / "storage/volume-0").exists()
    with pytest.raises(SandboxError, match="attached to disk/1"):
        rules.add_unit(world.model, app, attach=["volume/0"])


def test_destroyed_storage_stays_nowhere_and_new_one_has_another_number(world: World):
    app = world.add("disk", DISK)
    world.settle()
    remove(world, destroy=True)
    assert world.model.storage == {}
    with pytest.raises(SandboxError, match="'volume/0' not found"):
        rules.add_unit(world.model, app, attach=["volume/0"])
    rules.add_application(world.model, app)
    assert rules.add_unit(world.model, app).storages == [("volume", 1)]


def test_detached_storage_is_removed_by_its_name_alone(world: World, tmp_path: pathlib.Path):
    store = Store("t", tmp_path)
    world.add("disk", DISK)
    with pytest.raises(SandboxError, match="remove the unit first"):
        storage.remove(store, world.model, "volume/0")
    world.settle()
    remove(world)
    storage.remove(store, world.model, "volume/0")
    assert world.model.storage == {}


def test_a_charm_gets_no_storage_that_it_does_not_declare(world: World):
    app = world.add("disk", DISK)
    world.model.storage["data/7"] = Storage(name="data", index=7)
    with pytest.raises(SandboxError, match="disk has no storage 'data'"):
        rules.add_unit(world.model, app, attach=["data/7"])


@pytest.mark.parametrize(("length", "shown"), [(120, 120), (121, 123), (263, 123)])
def test_the_table_of_status_cuts_messages_as_juju_does(world: World, length: int, shown: int):
    world.add("disk", DISK)
    world.model.units["disk/0"].status = Status(name="blocked", message="x" * length)
    for line in view.as_text(world.model).splitlines():
        if line.startswith("disk"):
            assert line.split()[-1] == "x" * min(length, 120) + "..." * (shown > 120)
    data = view.as_data(world.model)["applications"]["disk"]
    assert data["units"]["disk/0"]["workload-status"]["message"] == "x" * length
