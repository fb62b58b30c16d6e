"""What makes a bundle right: Juju's rules for merging and deploying one, and this project's own.

`merge` follows juju/charm v12 overlay.go. `problems` returns one line per mistake and knows nothing of the sandbox:
the sandbox's own reader is checked against it.
"""

import collections
import collections.abc
import copy
import dataclasses
import functools
import itertools
import json
import pathlib
import re
from typing import Any

import slurmutils
import yaml

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUNDLE = ROOT / "bundle.yaml"
OVERLAYS = sorted((ROOT / "overlays").glob("*.yaml"))

_MAPS = ("options", "annotations", "resources", "storage", "devices", "bindings")
# Charmed HPC's slurmd writes these two itself (charms/slurmd/src/config.py @e292de4, _build_partition), slurmctld the third
# (charm.py, _on_slurmd_ready).
_PARTITION_TAKEN = {"partitionname", "nodes", "default"}
# What slurmctld's charm writes into slurm.conf and its includes (charms/slurmctld/src/charm.py @e292de4, _on_start; the
# option's text is the last include): two answers to one question, unless it is a list that may be longer.
_SLURM_CONF_TAKEN = set(
    "ClusterName SlurmctldHost AuthAltParameters AuthAltTypes AuthType CredType MaxNodeCount PluginDir SelectType"
    " SlurmctldParameters SlurmctldPort SlurmdPort StateSaveLocation SlurmdSpoolDir SlurmUser SlurmdUser Include"
    " AccountingStorageHost AccountingStorageType NodeName NodeSet PartitionName".split()
)
_OPTION_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "secret": (str,),
    "int": (int,),
    "float": (int, float),
    "boolean": (bool,),
}
# slurm.conf(5): without slurmdbd slurmctld is fatal over them ("slurmdbd is required to run with TRES gres/gpu"). Relations
# come after the first start, its unit is Type=notify, and a unit whose start hook failed handles no relation.
_AFTER_SLURMDBD = {"AccountingStorageTRES", "AccountingStorageEnforce"}
# Of one generation each: the daemons are of one Slurm, and a subordinate must have its principal's base.
_ONE_BASE = {"slurmctld", "slurmd", "sackd", "slurmdbd", "slurmrestd"}
# What each of Charmed HPC's charms claims of its host: the port that it opens, the files that it alone must write
# (internal/slurm-ops @e292de4: slurmctld.py, slurmrestd.py, sackd.py, slurmd.py; tests/upstream compares them).
CLAIMS = {
    "slurmctld": {"port 6817", "/etc/slurm/slurm.conf"},
    "slurmrestd": {"port 6820", "/etc/slurm/slurm.conf"},
    "slurmdbd": {"port 6819", "/etc/slurm/slurmdbd.conf"},
    "sackd": {"port 6818", "the client's Slurm"},
    "slurmd": {"port 6818", "the client's Slurm"},
}
# A machine of slurmctld or slurmrestd has a slurm.conf, which the commands there would read instead of the controller's.
CLIENTS, HOLDERS = {"sackd", "slurmd"}, {"slurmctld", "slurmrestd"}

type_of_bundle = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Endpoint:
    """One endpoint of a charm."""

    role: str  # provides or requires
    interface: str
    scope: str = "global"
    limit: int | None = None
    is_required: bool = False


@dataclasses.dataclass(frozen=True)
class Charm:
    """A charm's declarations, as far as a bundle can use them."""

    name: str
    bases: frozenset[str]
    channels: dict[
        str, frozenset[str]
    ]  # channel -> bases published there; empty: ours, deployed from a file
    endpoints: dict[str, Endpoint]
    options: dict[str, str]  # name -> type
    resources: frozenset[str]
    is_subordinate: bool = False
    is_offer: bool = False  # not a charm, but another model's offer


@functools.cache
def upstream_charms() -> dict[str, Charm]:
    """Return the facts of upstream.yaml, offers included (their names never collide with a charm's)."""
    facts = yaml.safe_load(pathlib.Path(__file__).with_name("upstream.yaml").read_text())
    charms = {name: _charm(name, fact) for name, fact in facts["charms"].items()}
    offers = {
        name: dataclasses.replace(_charm(name, fact), is_offer=True)
        for name, fact in facts["offers"].items()
    }
    return charms | offers


@functools.cache
def our_charms() -> dict[str, Charm]:
    """Read every charmcraft.yaml under charms/, keyed by the path of each base's file."""
    found: dict[str, Charm] = {}
    for path in sorted((ROOT / "charms").glob("*/charmcraft.yaml")):
        declared = yaml.safe_load(path.read_text())
        options = declared.get("config", {}).get("options", {})
        for number, platform in enumerate(declared["platforms"]):
            base = platform.partition(":")[0]
            fact = declared | {
                "options": {name: option["type"] for name, option in options.items()},
                "bases": [base],
            }
            folder = (
                f"./dist/{base.partition('@')[2]}" if number else "./dist"
            )  # as scripts/pack.py has it
            found[f"{folder}/{declared['name']}.charm"] = _charm(declared["name"], fact)
    return found


def _charm(name: str, fact: dict[str, Any]) -> Charm:
    endpoints: dict[str, Endpoint] = {}
    if not fact.get("subordinate"):
        endpoints["juju-info"] = Endpoint("provides", "juju-info")
    for role in ("provides", "requires"):
        for endpoint, spec in fact.get(role, {}).items():
            endpoints[endpoint] = Endpoint(
                role,
                spec["interface"],
                spec.get("scope", "global"),
                spec.get("limit"),
                spec.get("required", False) or spec.get("optional") is False,
            )
    channels = {channel: frozenset(bases) for channel, bases in fact.get("channels", {}).items()}
    return Charm(
        name=name,
        bases=frozenset(fact.get("bases", [])).union(*channels.values()),
        channels=channels,
        endpoints=endpoints,
        options=dict(fact.get("options", {})),
        resources=frozenset(fact.get("resources", {})),
        is_subordinate=bool(fact.get("subordinate")),
    )


def filled(path: pathlib.Path) -> str:
    """Return an overlay's text with each *FILL-IN replaced by the example from its comment.

    `*FILL-IN` is an alias without an anchor: no YAML parser accepts a file that still has one.
    """
    return re.sub(
        r"[*]FILL-IN  # ([^;\n]+);", lambda found: json.dumps(found[1]) + "  #", path.read_text()
    )


def read(path: pathlib.Path) -> type_of_bundle:
    """Return a bundle or overlay file, filled in; the path of a local charm is as from the bundle's folder."""
    bundle = yaml.safe_load(filled(path))
    for body in (bundle.get("applications") or {}).values():
        charm = (body or {}).get("charm", "")
        if charm.startswith("."):
            body["charm"] = "./" + str((path.parent / charm).resolve().relative_to(ROOT))
    return bundle


def merge(bundle: type_of_bundle, *overlays: type_of_bundle) -> type_of_bundle:
    """Return the bundle with the overlays merged into it, in order, the way `juju deploy --overlay` does."""
    merged = copy.deepcopy(bundle)
    for overlay in copy.deepcopy(overlays):
        for section in ("applications", "saas"):
            for name, body in (overlay.get(section) or {}).items():
                target: dict[str, Any] = merged.setdefault(section, {})
                if not body:
                    target.pop(name, None)
                    merged["relations"] = [
                        ends
                        for ends in merged.get("relations", [])
                        if name not in {end.split(":")[0] for end in ends}
                    ]
                elif name in target:
                    _merge_application(target[name], body)
                else:
                    target[name] = body
        merged["relations"] = [*merged.get("relations", []), *(overlay.get("relations") or [])]
        if overlay.get("machines") is not None:
            merged["machines"] = overlay["machines"]
    return merged


def _merge_application(target: dict[str, Any], body: dict[str, Any]) -> None:
    for key, value in body.items():
        if key in _MAPS and value:
            target[key] = {**(target.get(key) or {}), **value}
        else:
            target[key] = {} if key in _MAPS else value


def problems(bundle: type_of_bundle, charms: collections.abc.Mapping[str, Charm]) -> list[str]:
    """List the problems of a merged bundle, one line each; `charms` maps `charm:` values and offers to facts."""
    found: list[str] = []
    known: dict[str, Charm] = {}
    for name in bundle.get("saas") or {}:
        if name in charms and charms[name].is_offer:
            known[name] = charms[name]
        else:
            found.append(f"{name}: no such offer is known")
    for name, body in bundle["applications"].items():
        charm = charms.get(body.get("charm", ""))
        if charm is None or charm.is_offer:
            found.append(f"{name}: charm {body.get('charm')} is not known")
            continue
        known[name] = charm
        found += _application_problems(name, body, charm)
    found += _relation_problems(bundle, known)
    if not found:  # what follows trusts the names
        found += _placement_problems(bundle, known)
        found += _project_problems(bundle, known)
    return found


def _application_problems(
    name: str, body: dict[str, Any], charm: Charm
) -> collections.abc.Iterator[str]:
    units = body.get("num_units")
    if charm.is_subordinate and ("num_units" in body or "to" in body):
        yield f"{name}: {charm.name} is subordinate: it has neither num_units nor to"
    if not charm.is_subordinate and (
        not isinstance(units, int) or isinstance(units, bool) or units < 1
    ):
        yield f"{name}: num_units must be given, 1 or more (in a bundle its default is 0)"
    has_arch = "arch=amd64" in str(body.get("constraints", "")).split()
    if not charm.is_subordinate and not has_arch:
        yield f"{name}: no arch=amd64 in its constraints: Juju 4 adds it, and could deploy this bundle once only"
    if charm.is_subordinate and "constraints" in body:
        yield f"{name}: {charm.name} is subordinate: it has no constraints"
    if body.get("base") is None:
        yield f"{name}: no base given"
    elif body["base"] not in charm.channels.get(str(body.get("channel")), charm.bases):
        has = charm.channels.get(str(body.get("channel")), charm.bases)
        yield f"{name}: {charm.name} has no base {body['base']}; it has {', '.join(sorted(has))}"
    if charm.channels and body.get("channel") not in charm.channels:
        yield f"{name}: channel {body.get('channel')} is not one of {', '.join(sorted(charm.channels))}"
    for option, value in (body.get("options") or {}).items():
        kind = charm.options.get(option)
        if kind is None:
            yield f"{name}: {charm.name} has no option {option}"
        elif not isinstance(value, _OPTION_TYPES[kind]) or (
            isinstance(value, bool) and kind != "boolean"
        ):
            yield f"{name}: option {option} is a {kind}, not {value!r}"
    yield from _slurm_problems(name, body, charm)
    for resource in body.get("resources") or {}:
        if resource not in charm.resources:
            yield f"{name}: {charm.name} has no resource {resource}"


def _slurm_problems(name: str, body: dict[str, Any], charm: Charm) -> collections.abc.Iterator[str]:
    """Yield what Slurm's charms would refuse in their options, or overwrite without an error."""
    options = body.get("options") or {}
    if charm.name == "slurmd":
        yield from (
            f"{name}: {problem}"
            for problem in partition_problems(str(options.get("partition-config", "")))
        )
    if charm.name == "slurmctld":
        conf = str(options.get("slurm-conf-parameters", ""))
        yield from (f"{name}: {problem}" for problem in slurm_conf_problems(conf))
        yield from (
            f"{name}: slurm-conf-parameters: {key} is fatal for slurmctld until slurmdbd is active: set it afterwards"
            for key in sorted(_AFTER_SLURMDBD & set(_keys(conf)))
        )
        yield from (
            f"{name}: {problem}"
            for problem in cgroup_problems(str(options.get("cgroup-parameters", "")))
        )


def slurm_conf_problems(text: str) -> collections.abc.Iterator[str]:
    """Yield why slurmctld's option slurm-conf-parameters cannot have this text.

    Upstream's charm gives it to slurmutils' SlurmConfig (charms/slurmctld/src/config.py @e292de4) and then to slurmctld.
    """
    yield from _refusal("slurm-conf-parameters", slurmutils.SlurmConfig.from_str, text)
    for line in filter(None, map(str.strip, text.splitlines())):
        # A file of the site's; upstream's charm parses slurm.conf.* itself (slurm_ops/core/config.py)
        if re.fullmatch(r"include (?!slurm\.conf)\w+\.conf", line):
            continue
        key, equals, value = line.partition("=")
        if not (equals and value) or not key.isalpha() or re.search(r"\s\w+=", value):
            yield f"slurm-conf-parameters has one KEY=VALUE in a line, not {line}"
        elif key in _SLURM_CONF_TAKEN:
            yield f"slurm-conf-parameters: the charm itself says {key}"


def cgroup_problems(text: str) -> collections.abc.Iterator[str]:
    """Yield why slurmctld's option cgroup-parameters cannot have this text."""
    yield from _refusal("cgroup-parameters", slurmutils.CGroupConfig.from_str, text)


def partition_problems(text: str) -> collections.abc.Iterator[str]:
    """Yield why slurmd's option partition-config cannot have this text."""
    yield from _refusal("partition-config", slurmutils.Partition.from_str, text)
    if "\n" in text:
        yield "partition-config is one line"
    for word in text.split():
        key, equals, value = word.partition("=")
        if not (equals and value) or key.lower() in _PARTITION_TAKEN:
            yield f"partition-config has no {word} for an operator to say"


@functools.cache  # for bundles that differ in other options; slurmutils takes long
def _refusal(
    option: str, read: collections.abc.Callable[[str], object], text: str
) -> tuple[str, ...]:
    try:
        read(text)
    except (slurmutils.ModelError, ValueError) as e:  # what upstream's charms turn into Blocked
        return (
            f"{option}: slurmutils refuses it: {str(e).splitlines()[0].partition('. valid ')[0]}",
        )
    return ()


def _keys(conf: str) -> list[str]:
    return [line.partition("=")[0].strip() for line in conf.splitlines() if "=" in line]


def _relation_problems(
    bundle: type_of_bundle, known: collections.abc.Mapping[str, Charm]
) -> collections.abc.Iterator[str]:
    uses: collections.Counter[str] = collections.Counter()
    for ends in bundle.get("relations") or []:
        text = f"relation {ends}"
        sides: list[tuple[str, Charm, Endpoint]] = []
        for end in ends:
            name, _, endpoint = end.partition(":")
            if name not in known:
                yield f"{text}: no application {name}"
            elif not endpoint:
                yield f"{text}: the endpoint of {name} is left to inference"
            elif endpoint not in known[name].endpoints:
                yield f"{text}: {known[name].name} has no endpoint {endpoint}"
            else:
                sides.append((name, known[name], known[name].endpoints[endpoint]))
                uses[end] += 1
        if len(sides) != 2:
            continue
        (a_name, a_charm, a), (b_name, b_charm, b) = sides
        if a.interface != b.interface:
            yield f"{text}: {ends[0]} speaks {a.interface}, {ends[1]} speaks {b.interface}"
        if {a.role, b.role} != {"provides", "requires"}:
            yield f"{text}: both ends {a.role[:-1]} {a.interface}"
        if "container" not in (a.scope, b.scope):
            continue
        if not a_charm.is_subordinate and not b_charm.is_subordinate:
            yield f"{text}: lives on one machine, so one end must be subordinate and the other a principal"
        # As hardware-observer's cos-agent is: tests/functional/bundle.yaml.j2 of canonical/hardware-observer-operator@089ae93
        if a_charm.is_subordinate and b_charm.is_subordinate:
            hosts = principals_of(bundle, known)
            if not hosts[a_name] & hosts[b_name]:
                yield f"{text}: both ends are subordinate, and they stand beside no application in common"
    for end, count in uses.items():
        name, _, endpoint = end.partition(":")
        limit = known[name].endpoints[endpoint].limit
        if limit is not None and count > limit:
            yield f"{end}: {count} relations, at most {limit}"
    for name, charm in known.items():
        for endpoint, spec in charm.endpoints.items():
            if spec.is_required and f"{name}:{endpoint}" not in uses:
                yield f"{name}: endpoint {endpoint} must be related"


def _placement_problems(
    bundle: type_of_bundle, known: collections.abc.Mapping[str, Charm]
) -> collections.abc.Iterator[str]:
    principals = principals_of(bundle, known)
    for name, charm in known.items():
        if not charm.is_subordinate:
            continue
        if not principals[name]:
            yield f"{name}: is subordinate and stands on no principal, so it never has a unit"
        for principal in sorted(principals[name]):
            if bundle["applications"][principal]["base"] != bundle["applications"][name]["base"]:
                yield f"{name}: cannot stand on {principal}, whose base is {bundle['applications'][principal]['base']}"
    if "machines" in bundle:
        yield from _machine_problems(bundle, known)


def _machine_problems(
    bundle: type_of_bundle, known: collections.abc.Mapping[str, Charm]
) -> collections.abc.Iterator[str]:
    """Yield what cannot be placed on machines that exist: Juju adds none for `--map-machines=existing`."""
    applications, machines = bundle["applications"], bundle["machines"]
    hosts: dict[str, list[str]] = collections.defaultdict(
        list
    )  # machine or container -> applications
    for name, body in applications.items():
        if known[name].is_subordinate:
            continue
        places = body.get("to") or []
        if len(places) != body["num_units"]:
            yield f"{name}: {body['num_units']} units and {len(places)} places in `to`"
        for number, place in enumerate(places):
            kind, _, where = place.rpartition(":")
            beside, _, unit = where.partition("/")
            if beside in applications:  # the machine of another application's unit
                where = (applications[beside].get("to") or [""])[int(unit or 0)]
            if where not in machines:
                yield f"{name}: `to` names {place}, which is not one of the machines {', '.join(sorted(machines))}"
            elif kind:
                hosts[f"{where}/lxd/{name}/{number}"].append(name)
                hosts[where] += []
            else:
                hosts[where].append(name)
                if body["base"] != (machines[where] or {}).get("base"):
                    yield f"{name}: has base {body['base']}, machine {where} another"
    for machine, names in hosts.items():
        for one, other in itertools.combinations(sorted(known[name].name for name in names), 2):
            both = CLAIMS.get(one, set[str]()) & CLAIMS.get(other, set[str]())
            if both:
                yield f"machine {machine}: {one} and {other} both claim {', '.join(sorted(both))}"
            elif {one, other} & CLIENTS and {one, other} & HOLDERS:
                yield f"machine {machine}: {one} and {other} would share /etc/slurm/slurm.conf"


def _project_problems(
    bundle: type_of_bundle, known: collections.abc.Mapping[str, Charm]
) -> collections.abc.Iterator[str]:
    """Yield what Juju would accept and yet cannot work as a training cluster."""
    applications = bundle["applications"]
    by_charm: dict[str, list[str]] = collections.defaultdict(list)
    for name, charm in known.items():
        by_charm[charm.name].append(name)
    principals = principals_of(bundle, known)
    slurm = {
        name: applications[name]["base"] for name, charm in known.items() if charm.name in _ONE_BASE
    }
    if len(set(slurm.values())) > 1:
        bases = ", ".join(f"{name} {base}" for name, base in sorted(slurm.items()))
        yield f"the two generations of Slurm's charms do not mix: {bases}"
    for name in by_charm["slurmctld"]:
        partition = (applications[name].get("options") or {}).get("default-partition")
        if partition is not None and partition not in by_charm["slurmd"]:
            yield f"{name}: default-partition {partition} is no slurmd application"
    for name in by_charm["ddp-trainer"]:
        workspace = str((applications[name].get("options") or {}).get("workspace", ""))
        for host in sorted(principals[name] | set(by_charm["slurmd"])):
            mounts = [fs for fs in by_charm["shared-filesystem-client"] if host in principals[fs]]
            options = [applications[fs].get("options") or {} for fs in mounts]
            if not any(
                pathlib.PurePath(workspace).is_relative_to(o.get("mountpoint", "-"))
                for o in options
            ):
                yield f"{name}: workspace {workspace} is not on a filesystem mounted on {host}"
            if any(o.get("noexec") for o in options):
                yield f"{name}: {host} mounts the workspace noexec, and compiled Python modules do not load from there"
    for name in by_charm["shared-filesystem-client"]:
        if not any(f"{name}:filesystem" in ends for ends in bundle["relations"]):
            yield f"{name}: no filesystem to mount"
    for name in by_charm[
        "slurmrestd"
    ]:  # waits for accounting: slurmctld charm.py @e292de4, _on_slurmrestd_connected
        if not by_charm["slurmdbd"]:
            yield f"{name}: never becomes active without slurmdbd"


def principals_of(
    bundle: type_of_bundle, known: collections.abc.Mapping[str, Charm]
) -> dict[str, set[str]]:
    """Return each subordinate application's principals: the applications whose units it joins."""
    found: dict[str, set[str]] = collections.defaultdict(set)
    for first, second in bundle.get("relations") or []:
        for a, b in ((first, second), (second, first)):
            (a_name, _, a_end), (b_name, _, b_end) = a.partition(":"), b.partition(":")
            scopes = {known[a_name].endpoints[a_end].scope, known[b_name].endpoints[b_end].scope}
            if (
                known[a_name].is_subordinate
                and not known[b_name].is_subordinate
                and "container" in scopes
            ):
                found[a_name].add(b_name)
    return found
