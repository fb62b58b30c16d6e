"""gres.conf of the controller: upstream writes it once, slurm-gpu keeps a block in it, no event of upstream touches it."""

import collections.abc
import dataclasses
from typing import Any

import checkout
import pytest
from ops import testing
from slurmctld_state import PEER, SACKD, SLURMD, SLURMDBD, SLURMRESTD, STATE

from gpu import gres_conf
from host import Host
from slurm_ddp.interfaces import slurm_gres

LINES = (
    "Name=gpu Type=nvidia_a100 File=/dev/nvidia0 Cores=0-3",
    "Name=gpu Type=nvidia_a100 File=/dev/nvidia1",
)

Make = collections.abc.Callable[[Any], Any]
EVENTS: dict[str, Make] = {
    "install": lambda on: on.install(),
    "leader-elected": lambda on: on.leader_elected(),
    "config-changed": lambda on: on.config_changed(),
    "start": lambda on: on.start(),
    "update-status": lambda on: on.update_status(),
    "upgrade-charm": lambda on: on.upgrade_charm(),
    "stop": lambda on: on.stop(),
    "remove": lambda on: on.remove(),
    "peer-created": lambda on: on.relation_created(PEER),
    **{
        f"{relation.endpoint}-{event}": lambda on, relation=relation, event=event: getattr(
            on, event
        )(relation)
        for relation in (SLURMD, SACKD, SLURMDBD, SLURMRESTD)
        for event in (
            "relation_created",
            "relation_joined",
            "relation_changed",
            "relation_departed",
            "relation_broken",
        )
    },
    "rotate-auth-key": lambda on: on.action("rotate-auth-key"),
    "rotate-jwt-key": lambda on: on.action("rotate-jwt-key"),
    "show-current-config": lambda on: on.action("show-current-config"),
    "set-node-state": lambda on: on.action(
        "set-node-state", params={"nodes": "slurmd-0", "state": "down", "reason": "test"}
    ),
}


@pytest.fixture
def started(
    slurmctld: testing.Context[Any], host: Host, monkeypatch: pytest.MonkeyPatch
) -> testing.Context[Any]:
    """Upstream's slurmctld after install, config-changed and start; slurm-gpu's module looks at the same file."""
    monkeypatch.setattr(gres_conf, "PATH", host.etc / "gres.conf")
    host.nodes["slurmd-0"] = {"state": ["IDLE", "DYNAMIC_NORM"], "reason": ""}
    fresh = dataclasses.replace(STATE, relations={PEER}, secrets=[])
    state = slurmctld.run(slurmctld.on.install(), fresh)
    state = slurmctld.run(slurmctld.on.config_changed(), state)
    slurmctld.run(slurmctld.on.start(), state)
    assert "slurmctld" in host.active
    return slurmctld


def with_block() -> str:
    """Write the lines of a node as slurm-gpu's controller does; return the file."""
    book = gres_conf.read()
    assert book is not None
    published = slurm_gres.NodeGres(
        node="slurmd-0", gres="gpu:nvidia_a100:2", lines=LINES, awaits=True
    )
    entry = gres_conf.Entry.of("slurm-gpu/0", published)
    assert gres_conf.write(dataclasses.replace(book, entries={entry.unit: entry}))
    return gres_conf.PATH.read_text()


def test_what_upstream_writes_is_read(started: testing.Context[Any]):
    book = gres_conf.read()
    assert book is not None
    assert (book.autodetect, book.entries) == ("nvidia", {})


@pytest.mark.parametrize("event", EVENTS.values(), ids=EVENTS)
def test_no_event_of_upstream_touches_the_block(
    started: testing.Context[Any], host: Host, event: Make
):
    text = with_block()
    assert (
        "NodeName=slurmd-0 AutoDetect=off Name=gpu Type=nvidia_a100 File=/dev/nvidia0 Cores=0-3"
        in text
    )
    observed = event(started.on)
    started.run(observed, STATE)
    assert gres_conf.PATH.read_text() == text
    book = gres_conf.read()
    assert book is not None
    assert set(book.entries) == {"slurm-gpu/0"}


def test_a_rotation_of_the_key_to_its_end_does_not_touch_the_block(started: testing.Context[Any]):
    text = with_block()
    rotated = started.run(started.on.action("rotate-auth-key"), STATE)
    secret = rotated.get_secret(label="slurm-auth-key")
    secret._track_latest_revision()  # what upstream's secret-changed does, which the simulation gives observers only
    started.run(started.on.secret_remove(secret, revision=1), rotated)
    assert gres_conf.PATH.read_text() == text


def test_the_block_goes_and_upstream_s_text_is_as_it_was(started: testing.Context[Any]):
    before = gres_conf.PATH.read_text()
    with_block()
    book = gres_conf.read()
    assert book is not None
    gres_conf.write(dataclasses.replace(book, entries={}))
    assert gres_conf.PATH.read_text() == before


@pytest.mark.skipif(not checkout.IS_MAIN, reason="the track leaves the node in Slurm")
def test_slurmctld_deletes_the_node_of_a_unit_that_departs_and_keeps_the_block(
    started: testing.Context[Any], host: Host
):
    text = with_block()
    host.nodes["slurmd-1"] = {"state": ["IDLE", "DYNAMIC_NORM"], "reason": ""}
    event = started.on.relation_departed(SLURMD, remote_unit=0, departing_unit=0)
    started.run(event, STATE)
    assert set(host.nodes) == {"slurmd-1"}
    assert gres_conf.PATH.read_text() == text
