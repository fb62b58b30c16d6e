"""bundle.yaml and its overlays fit the charms, alone and in pairs, and make a training cluster."""

import functools
import itertools
import pathlib
import re

import deployments
import pytest
import slurm_charms
import yaml
from deployments import OVERLAYS, ROOT, SECOND, Deployment, Files

from sandbox import bundle as bundles
from sandbox.store import SandboxError

PROXIES = {"cephfs", "lustre", "nfs"}
# A client mounts one filesystem; a node is one kind of machine; the machines of that overlay cannot
# hold a second controller, nor Lustre's servers.
EXCLUSIVE = (
    PROXIES | {"lustre-server"},
    {"gpu", "lxd", "machines"},
    {"machines", "ha"},
    {"machines", "lustre-server"},
)
FIRST = ("2604", "machines")  # they say something of applications that others remove
NAMES = [*FIRST, *(path.stem for path in OVERLAYS if path.stem not in FIRST)]
SETS = [
    names
    for count in (0, 1, 2)
    for names in itertools.combinations(NAMES, count)
    if not any(set(names) <= group for group in EXCLUSIVE if count == 2)
]
MANY = [
    ("cos", "fair-share", "gpu", "ha", "identity", "juju4", "nfs"),
    ("2604", "cos", "fair-share", "gpu", "ha", "identity", "juju4", "lustre-server"),
]
SLURM = set(slurm_charms.CLAIMS)

all_sets = pytest.mark.parametrize("names", [*SETS, *MANY], ids="+".join)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return Files(tmp_path_factory.mktemp("bundle"))


@functools.cache
def deployed(files: Files, names: tuple[str, ...]) -> Deployment:
    """Merge overlays, each with its second part on Ubuntu 26.04.

    On existing machines a filesystem's proxy gets its place, and ldap-integrator a container.
    """
    seconds = {path.stem for path in SECOND} if "2604" in names else set[str]()
    paths: list[pathlib.Path] = []
    for name in names:
        paths.append(files.overlay(name))
        if name in seconds:
            paths.append(files.overlay(f"2604/{name}"))
    if "machines" in names:
        places = {f"{name}-server-proxy": {"to": ["0"]} for name in PROXIES & set(names)}
        if "identity" in names:
            places["ldap-integrator"] = {"to": ["lxd:0"]}
        paths.append(files.write(f"places-{'-'.join(names)}", {"applications": places}))
    return files.deployment(*paths)


@all_sets
def test_overlays_fit_the_charms_that_they_name(files: Files, names: tuple[str, ...]):
    deployment = deployed(files, names)
    bundles.check(deployment.bundle, deployment.declared)


@all_sets
def test_each_charm_is_published_for_its_base(files: Files, names: tuple[str, ...]):
    for app in deployed(files, names).bundle.applications.values():
        assert app.body["base"] in deployments.bases(app), app.name


@all_sets
def test_applications_with_units_name_the_architecture(files: Files, names: tuple[str, ...]):
    """Juju 4 adds it where it is missing, and then could deploy the bundle once only."""
    deployment = deployed(files, names)
    for name, app in deployment.bundle.applications.items():
        if not deployment.declared[name].get("subordinate"):
            assert "arch=amd64" in app.body["constraints"].split(), name
            assert app.body["num_units"] >= 1, name


@all_sets
def test_subordinates_stand_beside_units_of_their_base(files: Files, names: tuple[str, ...]):
    deployment = deployed(files, names)
    principals = deployment.principals()
    applications = deployment.bundle.applications
    for name, app in applications.items():
        if deployment.declared[name].get("subordinate"):
            found = {applications[one].body["base"] for one in principals[name]}
            assert found == {app.body["base"]}, name


@all_sets
def test_required_endpoints_are_related(files: Files, names: tuple[str, ...]):
    deployment = deployed(files, names)
    related = {end for ends in deployment.bundle.relations for end in ends}
    for name, declared in deployment.declared.items():
        for endpoint, about in declared.get("requires", {}).items():
            if about.get("required") or about.get("optional") is False:
                assert f"{name}:{endpoint}" in related


@all_sets
def test_slurm_s_daemons_are_of_one_generation(files: Files, names: tuple[str, ...]):
    deployment = deployed(files, names)
    bases: set[str] = set()
    for charm in SLURM:
        for name in deployment.named(charm):
            bases.add(deployment.bundle.applications[name].body["base"])
    assert len(bases) == 1


@all_sets
def test_slurm_takes_its_options(files: Files, names: tuple[str, ...]):
    deployment = deployed(files, names)
    for name in deployment.bundle.applications:
        given = deployment.options(name)
        for option in given.keys() & slurm_charms.CHECKS.keys():
            assert not list(slurm_charms.CHECKS[option](given[option]))
        lines = given.get("slurm-conf-parameters", "").splitlines()
        keys = {line.partition("=")[0].strip() for line in lines}
        assert not keys & slurm_charms.AFTER_SLURMDBD
    for name in deployment.named("slurmctld"):
        assert deployment.options(name)["default-partition"] in deployment.named("slurmd")


@all_sets
def test_the_workspace_is_mounted_where_jobs_start_and_run(files: Files, names: tuple[str, ...]):
    deployment = deployed(files, names)
    principals = deployment.principals()
    clients = deployment.named("shared-filesystem-client")
    for trainer in deployment.named("ddp-trainer"):
        workspace = pathlib.PurePath(deployment.options(trainer)["workspace"])
        for host in principals[trainer] | set(deployment.named("slurmd")):
            mounts = [deployment.options(name) for name in clients if host in principals[name]]
            assert any(workspace.is_relative_to(one.get("mountpoint", "-")) for one in mounts), host
            assert not any(one.get("noexec") for one in mounts), host
    for client in clients:
        related = [ends for ends in deployment.bundle.relations if f"{client}:filesystem" in ends]
        assert len(related) == 1, client


@pytest.mark.parametrize("names", [("machines",), ("2604", "machines")], ids="+".join)
def test_daemons_that_claim_the_same_share_no_machine(files: Files, names: tuple[str, ...]):
    bundle = deployed(files, names).bundle
    claimed: dict[str, set[str]] = {machine: set() for machine in bundle.machines}
    for name, app in bundle.applications.items():
        places = app.body.get("to", [])
        if app.body.get("num_units"):
            assert len(places) == app.body["num_units"], name
        for place in places:
            kind, _, machine = place.rpartition(":")
            assert machine in bundle.machines, place
            if kind:  # a container
                continue
            assert bundle.machines[machine]["base"] == app.body["base"], name
            claims = slurm_charms.CLAIMS.get(app.charm, set())
            assert not claimed[machine] & claims, name
            claimed[machine] |= claims


@pytest.mark.parametrize("path", ["scripts/pictures.yaml", "tests/functional/observability.yaml"])
def test_the_sandbox_s_collectors_can_be_related(files: Files, path: str):
    deployment = files.deployment(ROOT / path)
    bundles.check(deployment.bundle, deployment.declared)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"slurmctld": {"options": {"clustername": "x"}}}, "slurmctld: no option 'clustername'"),
        ({"trainer": {"num_units": 1}}, "trainer is subordinate: it has no num_units"),
        ({"trainer": {"resources": {"juice": "./x"}}}, "trainer has no resource 'juice'"),
    ],
)
def test_an_overlay_that_does_not_fit_is_refused(
    files: Files, body: deployments.Json, message: str
):
    path = files.write("wrong", {"applications": body})
    deployment = files.deployment(path)
    with pytest.raises(SandboxError, match=message):
        bundles.check(deployment.bundle, deployment.declared)


@pytest.mark.parametrize(
    ("relation", "message"),
    [
        (["slurmctld:login-node", "sackd:slurmctld"], "slurmctld has no endpoint 'login-node'"),
        (["slurmctld:smtp", "sackd:metrics-endpoint"], "cannot be related"),
        (["slurmd:slurmctld", "sackd:slurmctld"], "cannot be related"),
    ],
)
def test_a_relation_that_does_not_fit_is_refused(files: Files, relation: list[str], message: str):
    deployment = files.deployment(files.write("wrong", {"relations": [relation]}))
    with pytest.raises(SandboxError, match=message):
        bundles.check(deployment.bundle, deployment.declared)


def test_two_filesystems_for_one_mount_are_refused(files: Files):
    ends = ["shared-filesystem-client:filesystem", "statefs-server:filesystem"]
    second = files.write("wrong", {"relations": [ends]})
    deployment = files.deployment(files.overlay("ha"), second)
    with pytest.raises(SandboxError, match="client:filesystem takes 1 relation at most, not 2"):
        bundles.check(deployment.bundle, deployment.declared)


def test_2604_combines_with_every_other_overlay():
    others = {path.stem for path in OVERLAYS} - {"2604"}
    assert {names[1] for names in SETS if len(names) == 2 and names[0] == "2604"} == others


@pytest.mark.parametrize("path", SECOND, ids=lambda path: path.stem)
def test_a_second_part_is_named_after_its_overlay_and_follows_it(path: pathlib.Path):
    first = ROOT / "overlays" / path.name
    text = path.read_text()
    assert f"--overlay ./overlays/{path.name} --overlay ./overlays/2604/{path.name}" in text
    assert applications(path) <= applications(first)


def applications(path: pathlib.Path) -> set[str]:
    return set(yaml.safe_load(deployments.filled(path)).get("applications", {}))


@pytest.mark.parametrize("path", OVERLAYS, ids=lambda path: path.stem)
def test_each_overlay_changes_something_and_says_what_to_fill_in(files: Files, path: pathlib.Path):
    assert files.deployment(files.overlay(path.stem)).bundle != files.deployment().bundle
    text = path.read_text()
    lines = text.splitlines(keepends=True)
    header = "".join(itertools.takewhile(lambda line: line.startswith("#"), lines))
    assert f"--overlay ./overlays/{path.name}" in header
    assert re.search(r"fill in", header, re.IGNORECASE), (
        "the header says what to fill in, or that nothing is"
    )
    assert ("*FILL-IN" in text) == ("Nothing to fill in" not in header) or "URLs" in header


def test_every_mount_and_every_slurm_daemon_gets_a_machine_of_its_own_on_lxd(files: Files):
    deployment = deployed(files, ("lxd",))
    need = {name for charm in SLURM for name in deployment.named(charm)}
    for hosts in deployment.principals().values():
        need |= hosts
    have = {
        name
        for name, app in deployment.bundle.applications.items()
        if "virt-type=virtual-machine" in app.body.get("constraints", "").split()
    }
    assert have == need
