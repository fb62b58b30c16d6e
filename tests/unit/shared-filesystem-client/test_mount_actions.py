import pathlib
import typing

import pytest
import yaml
from fake_mounter import CHARM_ROOT, Site, offer, volume
from ops import testing

import mount_plan
from machine import Machine
from mount import actions
from scripts import keeper
from slurm_ddp import mounts, processes

HUNG = mounts.Result(mounts.State.HUNG, "/mnt/shared did not answer within 5 s")


class Bench:
    """The charm with a mount that works, and the commands that actions run."""

    def __init__(self, site: Site, root: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.site = site
        self.machine = Machine(packages={"fuse3"})
        self.machine.take_over(monkeypatch, [], root / "units")
        self.machine.active.add("juicefs-shared-filesystem-client.service")
        self.users: list[list[tuple[int, str]]] = []
        (root / "state/shared-filesystem-client/tmp").mkdir(parents=True)
        monkeypatch.setattr(mount_plan, "STATE", root / "state")
        monkeypatch.setattr(mount_plan, "CACHE", root / "cache")
        (root / "cache/shared-filesystem-client").mkdir(parents=True)
        monkeypatch.setattr(processes, "users", self._users)
        self.state = site.state(offer(volume()))
        site.ctx.run(site.ctx.on.config_changed(), self.state)

    def run(self, action: str, **params: typing.Any) -> dict[str, str]:
        self.site.ctx.run(self.site.ctx.on.action(action, params=params), self.state)
        return typing.cast("dict[str, str]", self.site.ctx.action_results or {})

    def error(self, action: str, **params: typing.Any) -> str:
        with pytest.raises(testing.ActionFailed) as caught:
            self.run(action, **params)
        return caught.value.message

    def _users(self, mountpoint: str) -> list[tuple[int, str]]:
        return self.users.pop(0) if self.users else []


@pytest.fixture
def bench(site: Site, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(site, tmp_path, monkeypatch)


def test_status_tells_what_the_keeper_saw(bench: Bench):
    repaired: dict[str, typing.Any] = {
        "heals": 2,
        "healed": "restart: gone",
        "healed_at": 1_799_999_000.0,
    }
    bench.site.mounter.seen = keeper.Health(
        state="right", since=1.8e9, checked=1.8e9 + 10, **repaired
    )
    bench.users = [[(12, "python3"), (34, "bash")]]
    results = bench.run("status")
    assert results["state"] == "right"
    assert results["since"] == "2027-01-15T08:00:00Z"
    assert results["repaired"] == "2 times; last restart: gone at 2027-01-15T07:43:20Z"
    assert results["users"] == "python3 (12), bash (34)"
    assert results["restart-pending"] == "false"
    assert results["metrics"] == "http://127.0.0.1:9567/metrics"
    assert "warning" not in results
    bench.site.mounter.look = HUNG
    assert bench.run("status")["detail"] == HUNG.detail
    bench.site.mounter.look = mounts.Result(mounts.State.RIGHT, open_mode=0o2775)
    results = bench.run("status")
    assert results["state"] == "right"
    assert results["warning"].endswith("others can replace folders in it (mode 2775)")
    assert results["warning"].startswith("chmod +t /mnt/")


def test_remount_is_refused_while_a_process_uses_it_waits_or_is_forced(bench: Bench):
    bench.users = [[(12, "python3")]]
    assert bench.error("remount") == (
        "/mnt/shared is in use by python3 (12): drain the node and wait (wait=SECONDS), or force=true, which breaks "
        "what they have open"
    )
    assert bench.site.mounter.remounts == 0
    bench.users = [[(12, "python3")], []]
    assert bench.run("remount", wait=60)["state"] == "right"
    bench.users = [[(12, "python3")]]
    bench.run("remount", force=True)
    assert bench.site.mounter.remounts == 2


def test_the_actions_are_those_that_are_declared():
    declared = yaml.safe_load((CHARM_ROOT / "charmcraft.yaml").read_text())["actions"]
    assert set(actions.ACTIONS) == set(declared)
    for name, action in actions.ACTIONS.items():
        assert set(action.parameters.model_fields) == set(declared[name].get("params", {})), name
