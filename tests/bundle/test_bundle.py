"""bundle.yaml, overlays and the sandbox's defaults fit the charms; each rule finds a mistake."""

import itertools
import re
from typing import Any

import pytest
import rules

PROXIES = {"cephfs", "lustre", "nfs"}
# A client mounts one filesystem; a node is one kind of machine; the machines of that overlay cannot
# hold a second controller, nor Lustre's servers.
EXCLUSIVE = (
    PROXIES | {"lustre-server"},
    {"gpu", "lxd", "machines"},
    {"machines", "ha"},
    {"machines", "lustre-server"},
)
# mysql-proxy is for 24.04: it cannot be on machines of 26.04
NEVER = ({"2604", "juju4", "machines"},)
FIRST = ("2604", "machines")  # they say something of applications that others remove
SETS = [
    names
    for count in range(len(rules.OVERLAYS) + 1)
    for names in itertools.combinations(
        [*FIRST, *(path.stem for path in rules.OVERLAYS if path.stem not in FIRST)], count
    )
    if all(len(group & set(names)) <= 1 for group in EXCLUSIVE)
    and not any(group <= set(names) for group in NEVER)
]
SECOND = sorted((rules.ROOT / "overlays" / "2604").glob("*.yaml"))


@pytest.fixture(scope="module")
def charms() -> dict[str, rules.Charm]:
    return rules.upstream_charms() | rules.our_charms()


@pytest.fixture(scope="module")
def bundle() -> dict[str, Any]:
    return rules.read(rules.BUNDLE)


def overlay(name: str) -> dict[str, Any]:
    return rules.read(rules.ROOT / "overlays" / f"{name}.yaml")


def overlays(names: tuple[str, ...]) -> list[dict[str, Any]]:
    """Return overlays as an operator fills them in, each with its second part on Ubuntu 26.04.

    On existing machines a filesystem's proxy gets its place, and on machines of 26.04 its base,
    too; ldap-integrator gets a container.
    """
    seconds = {path.stem: path for path in SECOND} if "2604" in names else {}
    found: list[dict[str, Any]] = []
    for name in names:
        found.append(overlay(name))
        if name in seconds:
            found.append(rules.read(seconds[name]))
    if "machines" in names:
        place = {"to": ["0"]} | ({"base": "ubuntu@26.04"} if "2604" in names else {})
        found += [
            {"applications": {f"{name}-server-proxy": place}} for name in PROXIES & set(names)
        ]
    if {"machines", "identity"} <= set(names):
        found.append({"applications": {"ldap-integrator": {"to": ["lxd:0"]}}})
    return found


def test_the_bundle_is_right(bundle: dict[str, Any], charms: dict[str, rules.Charm]):
    assert rules.problems(bundle, charms) == []


@pytest.mark.parametrize("names", SETS, ids="+".join)
def test_overlays_merge_alone_and_together(
    bundle: dict[str, Any], charms: dict[str, rules.Charm], names: tuple[str, ...]
):
    assert rules.problems(rules.merge(bundle, *overlays(names)), charms) == []


@pytest.mark.parametrize("path", ["scripts/pictures.yaml", "tests/functional/observability.yaml"])
def test_the_sandbox_s_collectors_can_be_related(
    bundle: dict[str, Any], charms: dict[str, rules.Charm], path: str
):
    assert rules.problems(rules.merge(bundle, rules.read(rules.ROOT / path)), charms) == []


def test_2604_combines_with_every_other_overlay():
    others = {path.stem for path in rules.OVERLAYS} - {"2604"}
    assert {names[1] for names in SETS if len(names) == 2 and names[0] == "2604"} == others


@pytest.mark.parametrize("path", SECOND, ids=lambda path: path.stem)
def test_a_second_part_is_named_after_its_overlay_and_follows_it(path: Any):
    first = rules.ROOT / "overlays" / path.name
    text = path.read_text()
    assert f"--overlay ./overlays/{path.name} --overlay ./overlays/2604/{path.name}" in text
    assert set(rules.read(path).get("applications", {})) <= set(rules.read(first)["applications"])


@pytest.mark.parametrize("path", rules.OVERLAYS, ids=lambda path: path.stem)
def test_each_overlay_changes_something_and_says_what_to_fill_in(bundle: dict[str, Any], path: Any):
    assert rules.merge(bundle, rules.read(path)) != bundle
    text = path.read_text()
    header = "".join(
        itertools.takewhile(lambda line: line.startswith("#"), text.splitlines(keepends=True))
    )
    assert f"--overlay ./overlays/{path.name}" in header
    assert re.search(r"fill in", header, re.IGNORECASE), (
        "the header says what to fill in, or that nothing is"
    )
    assert ("*FILL-IN" in text) == ("Nothing to fill in" not in header) or "URLs" in header


def test_every_mount_and_every_slurm_daemon_gets_a_machine_of_its_own_on_lxd(
    bundle: dict[str, Any], charms: dict[str, rules.Charm]
):
    merged = rules.merge(bundle, overlay("lxd"))
    known = {name: charms[body["charm"]] for name, body in merged["applications"].items()}
    hosts = rules.principals_of(merged, known)
    need = {
        name
        for name, charm in known.items()
        if charm.name.startswith("slurm") and not charm.is_subordinate
    }
    need |= {host for name in hosts for host in hosts[name]}
    have = {
        name
        for name, body in merged["applications"].items()
        if "virt-type=virtual-machine" in body.get("constraints", "").split()
    }
    assert have == need


MISTAKES: list[dict[str, Any]] = rules.yaml.safe_load(
    (rules.ROOT / "tests/bundle/mistakes.yaml").read_text()
)


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake["problem"])
def test_every_rule_finds_its_mistake(
    bundle: dict[str, Any], charms: dict[str, rules.Charm], mistake: dict[str, Any]
):
    removed = {"applications": dict.fromkeys(mistake.get("remove", []))}
    broken = rules.merge(bundle, *map(overlay, mistake.get("overlays", [])), removed)
    for path, value in mistake.get("set", {}).items():
        place, last = _place(broken, path)
        place[last] = value
    if "drop" in mistake:
        place, last = _place(broken, mistake["drop"])
        del place[last]
    if "unrelate" in mistake:
        broken["relations"].remove(mistake["unrelate"])
    if "relate" in mistake:
        broken["relations"].append(mistake["relate"])
    assert mistake["problem"] in rules.problems(broken, charms)


def _place(bundle: dict[str, Any], path: str) -> tuple[dict[str, Any], str]:
    """Return the mapping that holds the last key of a path, and that key."""
    *parents, last = path.split("/")
    for key in parents:
        bundle = bundle.setdefault(key, {})
    return bundle, last
