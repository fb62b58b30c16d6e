"""bundle.yaml, the overlays and the sandbox's defaults against what the charms declare; and each rule against a mistake."""

import collections.abc
import copy
import itertools
import re
from typing import Any

import pytest
import rules

Mistake = collections.abc.Callable[[dict[str, Any]], None]

SANDBOX = rules.ROOT / "sandbox" / "overlay.yaml"
FILESYSTEMS = {"cephfs", "lustre", "nfs"}
# A client mounts one filesystem; a node is one kind of machine; 26.04 mixes with no charm or machine of 24.04.
EXCLUSIVE = (FILESYSTEMS, {"gpu", "lxd", "machines"}, {"2604", "machines"}, {"2604", "juju4"}, {"2604", "cos"})
FIRST = ("2604", "machines")  # they say something of applications that others remove
SETS = [
    names
    for count in range(len(rules.OVERLAYS) + 1)
    for names in itertools.combinations(
        [*FIRST, *(path.stem for path in rules.OVERLAYS if path.stem not in FIRST)], count
    )
    if all(len(group & set(names)) <= 1 for group in EXCLUSIVE)
]


@pytest.fixture(scope="module")
def charms() -> dict[str, rules.Charm]:
    return rules.upstream_charms() | rules.our_charms()


@pytest.fixture(scope="module")
def bundle() -> dict[str, Any]:
    return rules.read(rules.BUNDLE)


def overlay(name: str) -> dict[str, Any]:
    return rules.read(rules.ROOT / "overlays" / f"{name}.yaml")


def overlays(names: tuple[str, ...]) -> list[dict[str, Any]]:
    """Return overlays as an operator fills them in: on machines that exist a filesystem's proxy is given its place."""
    found = [overlay(name) for name in names]
    if "machines" in names:
        found += [{"applications": {f"{name}-server-proxy": {"to": ["0"]}}} for name in FILESYSTEMS & set(names)]
    return found


def test_the_overlays_are_those_that_the_documentation_names():
    assert {path.stem for path in rules.OVERLAYS} == {
        "2604", "cephfs", "cos", "gpu", "juju4", "lustre", "lxd", "machines", "nfs",
    }  # fmt: skip


def test_the_bundle_is_right(bundle: dict[str, Any], charms: dict[str, rules.Charm]):
    assert rules.problems(bundle, charms) == []


@pytest.mark.parametrize("names", SETS, ids="+".join)
def test_overlays_merge_alone_and_together(
    bundle: dict[str, Any], charms: dict[str, rules.Charm], names: tuple[str, ...]
):
    assert rules.problems(rules.merge(bundle, *overlays(names)), charms) == []


@pytest.mark.parametrize("names", SETS, ids="+".join)
def test_the_order_of_overlays_does_not_matter_behind_those_that_come_first(
    bundle: dict[str, Any], names: tuple[str, ...]
):
    first = [name for name in names if name in FIRST]
    rest = [name for name in names if name not in FIRST]
    one, other = (rules.merge(bundle, *map(overlay, [*first, *order])) for order in (rest, rest[::-1]))
    for merged in (one, other):
        merged["relations"] = sorted(map(tuple, merged["relations"]))
    assert one == other


def test_the_sandbox_defaults_merge(bundle: dict[str, Any], charms: dict[str, rules.Charm]):
    merged = rules.merge(bundle, rules.read(SANDBOX))
    assert rules.problems(merged, charms) == []


@pytest.mark.parametrize("name", FIRST)
def test_an_overlay_that_comes_first_says_so(name: str):
    assert "Put it before other overlays." in (rules.ROOT / "overlays" / f"{name}.yaml").read_text()


@pytest.mark.parametrize("pair", [pair for group in EXCLUSIVE for pair in itertools.permutations(sorted(group), 2)])
def test_an_overlay_names_those_that_it_does_not_go_with(pair: tuple[str, str]):
    one, other = pair
    if {one, other} - FILESYSTEMS:  # each says that it is "instead of" the embedded volume
        texts = [(rules.ROOT / "overlays" / f"{name}.yaml").read_text() for name in pair]
        assert f"{other}.yaml" in texts[0] or f"{one}.yaml" in texts[1]


@pytest.mark.parametrize("path", rules.OVERLAYS, ids=lambda path: path.stem)
def test_each_overlay_changes_something_and_says_what_to_fill_in(bundle: dict[str, Any], path: Any):
    assert rules.merge(bundle, rules.read(path)) != bundle
    text = path.read_text()
    header = "".join(itertools.takewhile(lambda line: line.startswith("#"), text.splitlines(keepends=True)))
    assert f"--overlay ./overlays/{path.name}" in header
    assert re.search(r"fill in", header, re.IGNORECASE), "the header says what to fill in, or that nothing is"
    assert ("*FILL-IN" in text) == ("Nothing to fill in" not in header) or "URLs" in header


@pytest.mark.parametrize("path", rules.OVERLAYS, ids=lambda path: path.stem)
def test_no_reader_takes_an_overlay_that_is_not_filled_in(path: Any):
    text = path.read_text()
    if not re.search(r"^[^#]*FILL-IN", text, re.MULTILINE):
        return
    with pytest.raises(rules.yaml.YAMLError, match="undefined alias 'FILL-IN'"):
        rules.yaml.safe_load(text)
    body = re.sub("#.*", "", rules.filled(path))
    assert "FILL-IN" not in body, "each has an example in its comment, before a semicolon"


@pytest.mark.parametrize("name", sorted(FILESYSTEMS))
def test_a_filesystem_overlay_takes_the_place_of_juicefs(bundle: dict[str, Any], name: str):
    merged = rules.merge(bundle, overlay(name))
    assert "juicefs-server-proxy" not in merged["applications"]
    providers = [ends for ends in merged["relations"] if "shared-filesystem-client:filesystem" in ends]
    assert providers == [["shared-filesystem-client:filesystem", f"{name}-server-proxy:filesystem"]]


def test_every_mount_and_every_slurm_daemon_gets_a_machine_of_its_own_on_lxd(
    bundle: dict[str, Any], charms: dict[str, rules.Charm]
):
    merged = rules.merge(bundle, overlay("lxd"))
    known = {name: charms[body["charm"]] for name, body in merged["applications"].items()}
    hosts = rules.principals_of(merged, known)
    need = {name for name, charm in known.items() if charm.name.startswith("slurm") and not charm.is_subordinate}
    need |= {host for name in hosts for host in hosts[name]}
    have = {
        name
        for name, body in merged["applications"].items()
        if "virt-type=virtual-machine" in body.get("constraints", "").split()
    }
    assert have == need


def test_upstream_facts_name_their_source_and_are_all_used(bundle: dict[str, Any]):
    facts = rules.yaml.safe_load((rules.ROOT / "tests/bundle/upstream.yaml").read_text())
    assert all("@" in fact["source"] or "track" in fact["source"] for fact in facts["charms"].values())
    everything = rules.merge(bundle, *(overlay(name) for name in ("cephfs", "cos")))
    bodies = [body for path in (rules.BUNDLE, *rules.OVERLAYS) for body in rules.read(path)["applications"].values()]
    used = {body["charm"] for body in bodies if body and "charm" in body}
    assert set(facts["charms"]) == {name for name in used if not name.startswith(".")}
    assert set(facts["offers"]) == set(everything["saas"])


def test_merging_follows_juju():
    bundle: dict[str, Any] = {
        "applications": {
            "a": {"charm": "a", "num_units": 1, "options": {"x": 1, "y": 2}, "constraints": "mem=1G"},
            "b": {"charm": "b", "options": {"z": 3}},
            "gone": {"charm": "gone"},
        },
        "relations": [["a:e", "b:e"], ["a:e", "gone:e"], ["gone-not:e", "a:e"]],
    }
    changes: dict[str, Any] = {
        "applications": {
            "a": {"options": {"y": 5, "new": 6}, "constraints": "mem=2G"},
            "b": {"options": None},
            "gone": None,
            "added": {"charm": "c"},
        },
        "relations": [["added:e", "a:e"]],
    }
    before = copy.deepcopy(bundle)
    assert rules.merge(bundle, changes) == {
        "applications": {
            "a": {"charm": "a", "num_units": 1, "options": {"x": 1, "y": 5, "new": 6}, "constraints": "mem=2G"},
            "b": {"charm": "b", "options": {}},
            "added": {"charm": "c"},
        },
        "relations": [["a:e", "b:e"], ["gone-not:e", "a:e"], ["added:e", "a:e"]],
    }
    assert bundle == before


def _set(path: str, value: object) -> Mistake:
    def change(bundle: dict[str, Any]) -> None:
        *parents, last = path.split("/")
        for key in parents:
            bundle = bundle.setdefault(key, {})
        bundle[last] = value

    return change


def _drop(path: str) -> Mistake:
    def change(bundle: dict[str, Any]) -> None:
        *parents, last = path.split("/")
        for key in parents:
            bundle = bundle[key]
        del bundle[last]

    return change


def _relate(*ends: str, instead_of: list[str] | None = None) -> Mistake:
    def change(bundle: dict[str, Any]) -> None:
        if instead_of is not None:
            bundle["relations"].remove(instead_of)
        if ends:
            bundle["relations"].append(list(ends))

    return change


MISTAKES: list[tuple[Mistake, str]] = [
    (_set("aplications", {}), "bundle: unknown key aplications"),
    (_set("applications/slurmd/num_unit", 2), "slurmd: unknown key num_unit"),
    (_set("applications/slurmd/charm", "slurmdd"), "slurmd: charm slurmdd is not known"),
    (_set("applications/trainer/charm", "./dist/trainer.charm"), "trainer: charm ./dist/trainer.charm is not known"),
    (_drop("applications/slurmd/num_units"), "slurmd: num_units must be given, 1 or more (in a bundle its default is 0)"),
    (_set("applications/slurmd/num_units", 0), "slurmd: num_units must be given, 1 or more (in a bundle its default is 0)"),
    (
        _set("applications/trainer/num_units", 1),
        "trainer: ddp-trainer is subordinate: it has neither num_units nor to",
    ),
    (_set("applications/slurm-gpu/to", ["0"]), "slurm-gpu: slurm-gpu is subordinate: it has neither num_units nor to"),
    (_drop("applications/sackd/base"), "sackd: no base given"),
    (
        _set("applications/sackd/base", "ubuntu@22.04"),
        "sackd: sackd has no base ubuntu@22.04; it has ubuntu@24.04, ubuntu@26.04",
    ),
    (_set("applications/sackd/channel", "25.11/stable"), "sackd: channel 25.11/stable is not one of latest/edge"),
    (_drop("applications/mysql/channel"), "mysql: channel None is not one of 8.0/stable"),
    (_set("applications/trainer/channel", "edge"), "trainer: a charm from a file has neither channel nor revision"),
    (_set("applications/slurmctld/options/clustername", "x"), "slurmctld: slurmctld has no option clustername"),
    (_set("applications/slurmctld/options/cluster-name", 7), "slurmctld: option cluster-name is a string, not 7"),
    (
        _set("applications/trainer/resources", {"juice": "./x"}),
        "trainer: ddp-trainer has no resource juice",
    ),
    (
        _set("applications/slurmd/options/partition-config", "Nodes=ALL"),
        "slurmd: partition-config has no Nodes=ALL for an operator to say",
    ),
    (
        _set("applications/slurmd/options/partition-config", "DefMemPerGPU=much"),
        "slurmd: partition-config: slurmutils refuses it: 'much' is not of type 'integer'",
    ),
    (
        _set("applications/slurmd/options/partition-config", "MaxTime=1\nState=UP"),
        "slurmd: partition-config is one line",
    ),
    (
        _set("applications/slurmctld/options/slurm-conf-parameters", "SelectType=select/linear"),
        "slurmctld: slurm-conf-parameters: the charm itself says SelectType",
    ),
    (
        _set("applications/slurmctld/options/slurm-conf-parameters", "GresTypes=gpu\nprolog"),
        "slurmctld: slurm-conf-parameters has one KEY=VALUE in a line, not prolog",
    ),
    (
        _set("applications/slurmctld/options/slurm-conf-parameters", "PreemptMode=REQUEUE"),
        "slurmctld: slurm-conf-parameters: slurmutils refuses it: 'REQUEUE' is not of type 'array'",
    ),
    (
        _set("applications/slurmctld/options/slurm-conf-parameters", "HealthCheckProgram=/x HealthCheckInterval=300"),
        "slurmctld: slurm-conf-parameters has one KEY=VALUE in a line, not HealthCheckProgram=/x HealthCheckInterval=300",
    ),
    (
        _set("applications/slurmctld/options/slurm-conf-parameters", "AccountingStorageTRES=gres/gpu"),
        "slurmctld: slurm-conf-parameters: AccountingStorageTRES is fatal for slurmctld until slurmdbd is active: set it afterwards",
    ),
    (
        _set("applications/slurmctld/options/cgroup-parameters", "ConstrainEverything=yes"),
        "slurmctld: cgroup-parameters: slurmutils refuses it: unrecognized configuration field `constraineverything`",
    ),
    (_set("applications/slurmd/constraints", "memory=8G"), "slurmd: constraint memory=8G is not one of Juju's"),
    (_set("applications/slurmd/constraints", "mem=lots"), "slurmd: constraint mem=lots is not a size"),
    (
        _relate("slurmctld", "slurmd:slurmctld", instead_of=["slurmctld:slurmd", "slurmd:slurmctld"]),
        "relation ['slurmctld', 'slurmd:slurmctld']: the endpoint of slurmctld is left to inference",
    ),
    (
        _relate("slurmctld:login-node", "sackd:slurmctld"),
        "relation ['slurmctld:login-node', 'sackd:slurmctld']: slurmctld has no endpoint login-node",
    ),
    (_relate("slurmctl:sackd", "sackd:slurmctld"), "relation ['slurmctl:sackd', 'sackd:slurmctld']: no application slurmctl"),
    (
        _relate("slurmctld:smtp", "sackd:metrics-endpoint"),
        "relation ['slurmctld:smtp', 'sackd:metrics-endpoint']: slurmctld:smtp speaks smtp, sackd:metrics-endpoint speaks prometheus_scrape",
    ),
    (
        _relate("sackd:juju-info", "slurmd:juju-info"),
        "relation ['sackd:juju-info', 'slurmd:juju-info']: both ends provide juju-info",
    ),
    (
        _relate("slurm-gpu:node-gres", "slurm-gpu:gres"),
        "relation ['slurm-gpu:node-gres', 'slurm-gpu:gres']: an application cannot be related to itself",
    ),
    (
        _relate("trainer:juju-info", "sackd:juju-info"),
        "relation ['trainer:juju-info', 'sackd:juju-info']: stands twice",
    ),
    (_relate("trainer:juju-info"), "relation ['trainer:juju-info']: has two ends"),
    (
        _relate(instead_of=["slurm-gpu:compute", "slurmd:juju-info"]),
        "slurm-gpu: is subordinate and stands on no principal, so it never has a unit",
    ),
    (
        _relate("trainer:juju-info", "mysql:juju-info"),
        "trainer: cannot stand on mysql, whose base is ubuntu@22.04",
    ),
    (_relate(instead_of=["trainer:juju-info", "sackd:juju-info"]), "trainer: endpoint juju-info must be related"),
    (_relate(instead_of=["slurmdbd:database", "mysql:database"]), "slurmdbd: endpoint database must be related"),
    (_set("applications/slurmctld/options/default-partition", "gpu"), "slurmctld: default-partition gpu is no slurmd application"),
    (_set("applications/trainer/options/workspace", "/home"), "trainer: workspace /home is not on a filesystem mounted on sackd"),
    (
        _relate(instead_of=["shared-filesystem-client:juju-info", "slurmd:juju-info"]),
        "trainer: workspace /mnt/shared is not on a filesystem mounted on slurmd",
    ),
    (
        _relate(instead_of=["shared-filesystem-client:filesystem", "juicefs-server-proxy:filesystem"]),
        "shared-filesystem-client: no filesystem to mount",
    ),
    (_set("saas/prometheus", {"url": "x:y/z.prometheus"}), "prometheus: no such offer is known"),
]  # fmt: skip


@pytest.mark.parametrize(("mistake", "problem"), MISTAKES, ids=[problem for _, problem in MISTAKES])
def test_every_rule_finds_its_mistake(
    bundle: dict[str, Any], charms: dict[str, rules.Charm], mistake: Mistake, problem: str
):
    broken = copy.deepcopy(bundle)
    mistake(broken)
    assert problem in rules.problems(broken, charms)


PLACES: list[tuple[dict[str, list[str]], str]] = [
    ({"sackd": ["2"]}, "machine 2: sackd and slurmd both claim port 6818, the client's Slurm"),
    ({"slurmrestd": ["0"]}, "machine 0: slurmctld and slurmrestd both claim /etc/slurm/slurm.conf"),
    ({"sackd": ["0"]}, "machine 0: sackd and slurmctld would share /etc/slurm/slurm.conf"),
    ({"mysql": ["0"]}, "mysql: has base ubuntu@22.04, machine 0 another"),
    ({"mysql": ["kvm:0"]}, "mysql: `to` has kvm:0; a container is lxd:<machine>"),
    ({"slurmd": ["2"]}, "slurmd: 2 units and 1 places in `to`"),
    ({"slurmd": ["2", "4"]}, "slurmd: `to` names 4, which is not one of the machines 0, 1, 2, 3"),
    ({"slurmd": ["2", "2"]}, "machine 3: nothing is placed on it, which Juju refuses"),
]


@pytest.mark.parametrize(("places", "problem"), PLACES, ids=[problem for _, problem in PLACES])
def test_a_place_that_cannot_be_is_found(
    bundle: dict[str, Any], charms: dict[str, rules.Charm], places: dict[str, list[str]], problem: str
):
    changes = {"applications": {name: {"to": to} for name, to in places.items()}}
    assert problem in rules.problems(rules.merge(bundle, overlay("machines"), changes), charms)


def test_a_proxy_without_a_place_is_found(bundle: dict[str, Any], charms: dict[str, rules.Charm]):
    merged = rules.merge(bundle, overlay("machines"), overlay("nfs"))
    assert rules.problems(merged, charms) == ["nfs-server-proxy: 1 units and 0 places in `to`"]


def test_two_generations_are_found(bundle: dict[str, Any], charms: dict[str, rules.Charm]):
    changes = overlay("2604")["applications"] | {"slurmdbd": {"base": "ubuntu@24.04"}}
    (problem,) = rules.problems(rules.merge(bundle, {"applications": changes}), charms)
    assert problem.startswith("the two generations of Slurm's charms do not mix: sackd ubuntu@26.04, ")


def test_two_filesystems_are_one_too_many(bundle: dict[str, Any], charms: dict[str, rules.Charm]):
    merged = rules.merge(bundle, overlay("nfs"), overlay("cephfs"))
    assert rules.problems(merged, charms) == ["shared-filesystem-client:filesystem: 2 relations, at most 1"]


def test_a_share_that_forbids_running_code_is_found(bundle: dict[str, Any], charms: dict[str, rules.Charm]):
    broken = copy.deepcopy(bundle)
    broken["applications"]["shared-filesystem-client"]["options"]["noexec"] = True
    found = rules.problems(broken, charms)
    assert "trainer: slurmd mounts the workspace noexec, and compiled Python modules do not load from there" in found


def test_rest_without_accounting_is_found(bundle: dict[str, Any], charms: dict[str, rules.Charm]):
    merged = rules.merge(bundle, {"applications": {"slurmdbd": None, "mysql": None}})
    assert rules.problems(merged, charms) == ["slurmrestd: never becomes active without slurmdbd"]


def test_two_subordinates_are_related_only_beside_one_principal(bundle: dict[str, Any], charms: dict[str, rules.Charm]):
    merged = rules.merge(bundle, overlay("cos"))
    assert rules.problems(merged, charms) == []
    merged["relations"].remove(["opentelemetry-collector:cos-agent", "slurm-gpu-controller:cos-agent"])
    merged["relations"].append(["opentelemetry-collector-nodes:cos-agent", "slurm-gpu-controller:cos-agent"])
    text = "relation ['opentelemetry-collector-nodes:cos-agent', 'slurm-gpu-controller:cos-agent']"
    assert rules.problems(merged, charms) == [
        f"{text}: both ends are subordinate, and they stand beside no application in common"
    ]


def test_two_principals_cannot_share_a_machine(bundle: dict[str, Any], charms: dict[str, rules.Charm]):
    fact = charms["sackd"]
    inverted = rules.dataclasses.replace(
        fact, endpoints=fact.endpoints | {"peer": rules.Endpoint("requires", "juju-info", "container")}
    )
    broken = copy.deepcopy(bundle)
    broken["relations"].append(["sackd:peer", "slurmd:juju-info"])
    assert rules.problems(broken, charms | {"sackd": inverted}) == [
        "relation ['sackd:peer', 'slurmd:juju-info']: lives on one machine, so one end must be subordinate and the other"
        " a principal"
    ]
