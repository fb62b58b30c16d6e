"""The addresses of a node, in a network namespace with secondary ones."""

import pathlib
import subprocess
import sys

import pytest

from ddp.node import network

UNSHARE = ("unshare", "--user", "--map-root-user", "--net", "sh", "-ec")
SETUP = """
ip link add v type veth peer name w && ip link set v up && ip addr add 10.1.1.1/24 dev v
ip addr add 10.1.1.2/24 dev v label v:x
ip link set w up && ip addr add 10.3.0.1/24 dev w
ip route replace 10.2.0.0/24 dev v src 10.1.1.2
"""


@pytest.mark.skipif(
    subprocess.run([*UNSHARE, SETUP], check=False, capture_output=True).returncode != 0,
    reason="this machine allows no user namespaces with interfaces",
)
@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        ("", "('10.1.1.2', 'v')"),
        ("v", "('10.1.1.2', 'v')"),
        ("w", "('10.3.0.1', 'w')"),
        ("none", "('10.1.1.2', 'v')"),
    ],
)
def test_a_secondary_address_belongs_to_its_interface(wanted: str, found: str):
    code = f"from ddp.node import network; print(network.find_way('10.2.0.9', 'peer', {wanted!r}))"
    path = pathlib.Path(network.__file__).parents[2]
    argv = [*UNSHARE, f'{SETUP}\nPYTHONPATH={path} {sys.executable} -c "$0"', code]
    assert subprocess.run(argv, check=True, capture_output=True, text=True).stdout.strip() == found
