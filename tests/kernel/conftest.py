"""One guest for all tests of a run."""

import collections.abc
import os

import guest as machines
import nodes
import pytest


@pytest.fixture(scope="session")
def node() -> collections.abc.Iterator[nodes.Node]:
    """Return a node that mounts nothing yet."""
    if os.geteuid() != 0:
        pytest.fail(
            "the guest's disk is made with mmdebstrap and systemd-nspawn: run this as root",
            pytrace=False,
        )
    missing = machines.missing_tools()
    if missing:
        pytest.fail(f"install {', '.join(missing)}: scripts/setup.sh guest", pytrace=False)
    with machines.booted(memory_mib=2048) as guest:
        node = nodes.Node(guest)
        node.prepare()
        yield node
