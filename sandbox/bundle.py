"""bundle.yaml and its overlays: merged by Juju's rules, checked against the charms' metadata.

The rules of Juju 3.6 (juju/charm v12, overlay.go and bundledata.go): an overlay merges into an
application's mappings (options, annotations, resources ...) and replaces everything else; an
application with an empty body is removed together with its relations; relations are added.
"""

import collections
import collections.abc
import dataclasses
import difflib
import pathlib
import typing

import yaml

from sandbox.store import SandboxError, section

_MERGED = ("options", "annotations", "resources", "storage", "bindings")
_APPLICATION_KEYS = frozenset(
    "charm channel revision base series num_units options annotations resources constraints to storage bindings expose "
    "trust devices plan requires offers exposed-endpoints".split()
)
# Of bundle.yaml and overlays/2604.yaml, which Debian 12 stands for
BASES = ("ubuntu@24.04", "ubuntu@22.04", "ubuntu@26.04")
_BUNDLE_KEYS = frozenset(
    "name description tags type default-base series bundle applications relations machines variables saas website "
    "source issues docs".split()
)
_OPTION_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "int": (int,),
    "float": (float, int),
    "boolean": (bool,),
    "secret": (str,),
}

ARCH = "arch=amd64"  # the only constraint that the sandbox accepts, since it has no effect here
NOT_PLAYED = (
    "Not played by the sandbox."  # the description of such endpoints and options of stand-ins
)

Json = dict[str, typing.Any]


@dataclasses.dataclass
class BundleApplication:
    """One application of the merged bundle."""

    name: str
    body: Json
    charm: str  # as written; a path is absolute
    attach: tuple[str, ...] = ()  # storage that its one unit gets

    @property
    def is_local(self) -> bool:
        """Whether `charm` is a file of ours and not a name in Charmhub."""
        return self.charm.startswith("/")


@dataclasses.dataclass
class Bundle:
    """The merged bundle: its applications by name, and relations as two `application:endpoint`."""

    applications: dict[str, BundleApplication] = dataclasses.field(
        default_factory=dict[str, BundleApplication]
    )
    relations: list[tuple[str, str]] = dataclasses.field(default_factory=list[tuple[str, str]])
    machines: Json = dataclasses.field(default_factory=dict[str, typing.Any])
    offers: list[str] = dataclasses.field(default_factory=list[str])  # of other models


class _Loader(yaml.SafeLoader):
    """Refuses a key that is given twice."""

    def construct_mapping(
        self, node: yaml.MappingNode, deep: bool = False
    ) -> dict[typing.Hashable, typing.Any]:
        keys: list[str] = []
        for key, _ in node.value:
            if key.value in keys:
                raise yaml.MarkedYAMLError(
                    problem=f"{key.value!r} is given twice", problem_mark=key.start_mark
                )
            keys.append(key.value)
        return super().construct_mapping(node, deep)


def load(
    path: pathlib.Path,
    overlays: collections.abc.Sequence[pathlib.Path] = (),
    defaults: pathlib.Path | None = None,
) -> Bundle:
    """Read `path`, merge the part of `defaults` about its applications, then `overlays`.

    Raises:
        SandboxError: a file cannot be read or has a mistake.
    """
    bundle = Bundle()
    for document in _parse(path):
        _merge(bundle, path, document)
    for document in _parse(defaults) if defaults is not None else []:
        for name, body in document["applications"].items():
            _merge_application(
                bundle, typing.cast(pathlib.Path, defaults), name, body, is_default=True
            )
    for file in overlays:
        for document in _parse(file):
            _merge(bundle, file, document)
    bundle.applications = {name: app for name, app in bundle.applications.items() if app.charm}
    return bundle


def single(
    charm: pathlib.Path, app: str, options: Json, attach: tuple[str, ...], defaults: pathlib.Path
) -> Bundle:
    """Describe the deployment of one charm with one unit, as by `juju deploy ./CHARM [APP]`."""
    of_charm = next(
        (document["applications"].get(charm.stem) for document in _parse(defaults)), None
    )
    bundle = Bundle()
    if of_charm is not None:
        _merge_application(bundle, defaults, app, of_charm, is_default=True)
    _merge_application(
        bundle, charm, app, {"charm": str(charm.resolve()), "num_units": 1, "options": options}
    )
    bundle.applications[app].attach = attach
    return bundle


def _parse(file: pathlib.Path) -> list[Json]:
    try:
        documents: list[Json] = list(yaml.load_all(file.read_text(), _Loader))
    except OSError as e:
        raise SandboxError(f"{file}: {e.strerror}") from e
    except yaml.MarkedYAMLError as e:
        line = f"{file.name} line {e.problem_mark.line + 1 if e.problem_mark else 1}"
        raise SandboxError(f"{line}: not YAML: {e.problem}") from e
    return [_mapping(file, "a bundle", document) for document in documents]


def _mapping(file: pathlib.Path, what: str, value: object) -> Json:
    """Return a mapping of a bundle, empty if it is missing."""
    if value is not None and not isinstance(value, dict):
        raise SandboxError(f"{file.name}: {what} is a mapping")
    return typing.cast("Json | None", value) or {}


def _check_keys(where: str, given: Json, known: frozenset[str]) -> None:
    for key in given.keys() - known:
        raise SandboxError(f"{where}: unknown key {key!r}{_guess(key, known)}")


def _apps(ends: tuple[str, ...]) -> set[str]:
    """Return the applications at the ends of a relation."""
    return {end.split(":")[0] for end in ends}


def _merge(bundle: Bundle, file: pathlib.Path, document: Json) -> None:
    _check_keys(file.name, document, _BUNDLE_KEYS)
    if "machines" in document:
        bundle.machines = _mapping(file, "machines", document["machines"])
    bundle.offers += _mapping(file, "saas", document.get("saas"))
    for name, body in _mapping(file, "applications", document.get("applications")).items():
        if body is not None:
            _merge_application(bundle, file, name, body)
            continue
        if name not in bundle.applications:
            raise SandboxError(
                f"{file.name}: no application {name!r} to remove{_guess(name, bundle.applications)}"
            )
        del bundle.applications[name]
        bundle.relations = [ends for ends in bundle.relations if name not in _apps(ends)]
    relations: object = document.get("relations") or []
    for ends in (
        typing.cast(list[object], relations) if isinstance(relations, list) else [relations]
    ):
        match ends:
            case [str(first), str(second)]:
                bundle.relations.append((first, second))
            case _:
                raise SandboxError(
                    f"{file.name}: relation {ends!r} is not a list of two application:endpoint"
                )


def _merge_application(
    bundle: Bundle, file: pathlib.Path, name: str, given: object, *, is_default: bool = False
) -> None:
    where = f"{file.name}: application {name!r}"
    body = _mapping(file, f"application {name!r}", given)
    _check_keys(where, body, _APPLICATION_KEYS)
    app = bundle.applications.get(name) or BundleApplication(name, {}, "")
    for key, value in body.items():
        if key not in _MERGED:
            app.body[key] = value
            continue
        merged = app.body.setdefault(key, {})
        for item, text in _mapping(file, f"application {name!r}: {key}", value).items():
            is_path = key == "resources" and isinstance(text, str)
            merged[item] = str((file.parent / text).resolve()) if is_path else text
    if "charm" in body:
        charm = str(body["charm"])
        app.charm = str((file.parent / charm).resolve()) if charm.startswith((".", "/")) else charm
    if not app.charm and not is_default:
        raise SandboxError(
            f"{where} has no charm, and the bundle lacks it{_guess(name, bundle.applications)}"
        )
    bundle.applications[name] = app


def check(bundle: Bundle, metadata: collections.abc.Mapping[str, Json]) -> None:
    """Check options, units and relations against metadata (application -> charmcraft.yaml).

    Raises:
        SandboxError: the first mistake, and what exists instead.
    """
    for app in bundle.applications.values():
        declared = metadata[app.name]
        options = section(section(declared, "config"), "options")
        for option, value in app.body.get("options", {}).items():
            if problem := option_problem(option, value, options):
                raise SandboxError(f"{app.name}: {problem}")
        _check_units(app, declared)
        known = section(declared, "resources")
        for resource in app.body.get("resources", {}):
            if resource not in known:
                raise SandboxError(
                    f"{app.name} has no resource {resource!r}{_guess(resource, known)}"
                )
    for ends in bundle.relations:
        check_relation(ends, metadata)
    _check_limits(bundle, metadata)


def check_playable(bundle: Bundle) -> None:
    """Check that the sandbox can play the bundle. Raises SandboxError: the first thing it cannot."""
    if bundle.machines:
        raise SandboxError("machines: in the sandbox each unit has its own host: leave it out")
    for app in bundle.applications.values():
        for key in ("constraints", "to"):
            if app.body.get(key, ARCH) != ARCH:
                raise SandboxError(
                    f"{app.name}: {key} is for Juju's machines: leave this overlay out in the sandbox"
                )
        base = app.body.get("base", BASES[0])
        if base not in BASES:
            raise SandboxError(
                f"{app.name}: the sandbox's hosts have base {' or '.join(BASES)}, not {base}"
            )
        for resource, path in app.body.get("resources", {}).items():
            if isinstance(path, str) and not pathlib.Path(path).is_file():
                raise SandboxError(f"{app.name}: resource {resource!r}: no file {path}")


def _check_units(app: BundleApplication, metadata: Json) -> None:
    units = app.body.get("num_units")
    if not metadata.get("subordinate"):
        if not isinstance(units, int) or isinstance(units, bool) or not 0 <= units <= 64:
            raise SandboxError(f"{app.name}: num_units must be a number from 0 to 64")
        return
    for key in ("num_units", "constraints", "to"):
        if app.body.get(key):
            raise SandboxError(f"{app.name} is subordinate: it has no {key}")


def _check_limits(bundle: Bundle, metadata: collections.abc.Mapping[str, Json]) -> None:
    uses = collections.Counter(end for ends in set(bundle.relations) for end in ends)
    for end, count in uses.items():
        app, _, endpoint = end.partition(":")
        limit = endpoints_of(metadata[app])[endpoint]["limit"]
        if limit is not None and count > limit:
            raise SandboxError(f"{end} takes {limit} relation at most, not {count}")


def option_problem(
    option: str, value: object, declared: collections.abc.Mapping[str, Json]
) -> str | None:
    """Return the mistake in setting `option` to `value`, or None."""
    if option not in declared:
        return f"no option {option!r}{_guess(option, declared)}"
    if declared[option].get("description") == NOT_PLAYED:
        return f"the sandbox does not play option {option!r}"
    kind = declared[option]["type"]
    fits = isinstance(value, _OPTION_TYPES[kind]) and (
        kind == "boolean" or not isinstance(value, bool)
    )
    return None if fits else f"option {option!r} is of type {kind}, not {value!r}"


def check_relation(ends: tuple[str, str], metadata: collections.abc.Mapping[str, Json]) -> bool:
    """Return whether a relation's ends must be on one machine; `SandboxError` if they misfit."""
    sides: list[Json] = []
    for end in ends:
        app, _, endpoint = end.partition(":")
        if app not in metadata:
            raise SandboxError(
                f"relation {list(ends)}: no application {app!r}{_guess(app, metadata)}"
            )
        endpoints = endpoints_of(metadata[app])
        if not endpoint:
            raise SandboxError(
                f"relation {list(ends)}: name the endpoint of {app} ({', '.join(endpoints)})"
            )
        if endpoint not in endpoints:
            raise SandboxError(f"{app} has no endpoint {endpoint!r}{_guess(endpoint, endpoints)}")
        if endpoints[endpoint].get("description") == NOT_PLAYED:
            raise SandboxError(
                f"relation {list(ends)}: the sandbox does not play {end}: leave the relation out here"
            )
        sides.append(endpoints[endpoint] | {"subordinate": metadata[app].get("subordinate")})
    a, b = sides
    if a["interface"] != b["interface"]:
        raise SandboxError(
            f"{ends[0]} (interface {a['interface']}) cannot be related to {ends[1]} (interface {b['interface']})"
        )
    if {a["role"], b["role"]} != {"provides", "requires"}:
        raise SandboxError(
            f"{ends[0]} and {ends[1]} both {a['role'][:-1]} {a['interface']}: one must provide, one require"
        )
    container = "container" in (a["scope"], b["scope"])
    if container and not (a["subordinate"] or b["subordinate"]):
        raise SandboxError(
            f"{ends[0]} and {ends[1]} live in one container, but neither charm is subordinate"
        )
    return container


def endpoints_of(metadata: Json) -> dict[str, Json]:
    """Return a charm's {endpoint: {role, interface, scope, limit}}, including `juju-info`."""
    found: dict[str, Json] = {
        "juju-info": {
            "role": "provides",
            "interface": "juju-info",
            "scope": "global",
            "limit": None,
        }
    }
    for role in ("provides", "requires"):
        for name, spec in section(metadata, role).items():
            found[name] = {"role": role, "scope": "global", "limit": None} | spec
    return found


def _guess(name: str, known: collections.abc.Iterable[str]) -> str:
    known = list(known)
    close = difflib.get_close_matches(name, known, n=1)
    if close:
        return f": did you mean {close[0]!r}?"
    return f" (there are: {', '.join(sorted(known))})" if known else " (it has none)"
