"""One guest for all tests of a run, and the figures that they measure."""

import collections.abc
import os

import guest as machines
import nodes
import pytest

_figures: list[str] = []


@pytest.fixture(scope="session")
def figures() -> list[str]:
    """Return the lines that are shown at the end of the run."""
    return _figures


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if _figures:
        terminalreporter.section("measured, in the guest's seconds")
        for line in _figures:
            terminalreporter.line(line)


@pytest.fixture(scope="session")
def node() -> collections.abc.Iterator[nodes.Node]:
    """Return a node that mounts nothing yet."""
    if os.geteuid() != 0:
        pytest.fail("the guest's disk is made with mmdebstrap and systemd-nspawn: run this as root", pytrace=False)
    missing = machines.missing_tools()
    if missing:
        pytest.fail(f"install {', '.join(missing)}: scripts/setup.sh guest", pytrace=False)
    with machines.booted(memory_mib=1536) as guest:
        node = nodes.Node(guest)
        node.prepare()
        yield node
