"""bundle.yaml and its overlays: read with line numbers, merged by Juju's rules, checked against the charms' metadata.

The rules are those of Juju 3.6 (juju/charm v12, overlay.go and bundledata.go): an overlay merges into an
application's mappings (options, annotations, resources ...) and replaces everything else; an application with an empty
body is removed together with its relations; relations are added.
"""

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


@dataclasses.dataclass(frozen=True)
class Where:
    """A place in a file, for messages: `bundle.yaml line 12`."""

    file: pathlib.Path
    line: int

    def __str__(self) -> str:
        """Return the file's name and the line."""
        return f"{self.file.name} line {self.line}"


class BundleError(SandboxError):
    """The bundle is wrong; `str()` starts with the file and line."""

    def __init__(self, where: Where, message: str) -> None:
        super().__init__(f"{where}: {message}")


@dataclasses.dataclass
class BundleApplication:
    """One application of the merged bundle. `where` maps each key to the place that set it last."""

    name: str
    body: dict[str, typing.Any]
    where: dict[str, Where]
    charm: str  # as written; a path is absolute

    @property
    def is_local(self) -> bool:
        """Whether `charm` is a file of ours and not a name in Charmhub."""
        return self.charm.startswith("/")

    def at(self, *keys: str) -> Where:
        """Return where the first known of `keys` was set."""
        return next((self.where[key] for key in keys if key in self.where), self.where[""])


@dataclasses.dataclass
class BundleRelation:
    """One relation of the merged bundle: two `application:endpoint` texts."""

    ends: tuple[str, str]
    where: Where


@dataclasses.dataclass
class Bundle:
    """The merged bundle."""

    name: str
    applications: dict[str, BundleApplication]
    relations: list[BundleRelation]


class _Mapping(dict[str, typing.Any]):
    """A mapping that knows the line of each key."""

    def __init__(self, lines: dict[str, int]) -> None:
        super().__init__()
        self.lines = lines


class _Sequence(list[typing.Any]):
    """A list that knows the line of each item."""

    lines: list[int]


def _construct(loader: typing.Any, node: yaml.Node) -> typing.Any:
    return loader.construct_object(node, deep=True)


class _Loader(yaml.SafeLoader):
    """Reads mappings and lists with their lines, and no key twice."""

    file: pathlib.Path

    def mapping(self, node: yaml.MappingNode) -> _Mapping:
        made = _Mapping({})
        for key_node, value_node in node.value:
            key, line = str(key_node.value), key_node.start_mark.line + 1
            if key in made:
                raise BundleError(Where(self.file, line), f"{key!r} is given twice")
            made[key] = _construct(self, value_node)
            made.lines[key] = line
        return made

    def sequence(self, node: yaml.SequenceNode) -> _Sequence:
        made = _Sequence(_construct(self, item) for item in node.value)
        made.lines = [item.start_mark.line + 1 for item in node.value]
        return made


_Loader.add_constructor("tag:yaml.org,2002:map", _Loader.mapping)
_Loader.add_constructor("tag:yaml.org,2002:seq", _Loader.sequence)


def _entries(file: pathlib.Path, above: _Mapping, key: str, what: str = "") -> _Mapping:
    """Return the mapping below a key, empty if there is none."""
    value = above.get(key)
    if value is not None and not isinstance(value, _Mapping):
        raise BundleError(Where(file, above.lines[key]), f"{what or key} is a mapping")
    return value or _Mapping({})


def load(
    path: pathlib.Path, overlays: collections.abc.Sequence[pathlib.Path] = (), defaults: pathlib.Path | None = None
) -> Bundle:
    """Read `path`, merge the part of `defaults` about its applications, then `overlays`.

    Raises:
        BundleError: a mistake, with its place.
        SandboxError: a file that cannot be read.
    """
    bundle = Bundle(name=path.stem, applications={}, relations=[])
    for document in _parse(path):
        _merge(bundle, path, document)
    for document in _parse(defaults) if defaults is not None else []:
        applications = document["applications"]
        for name in applications.keys() - bundle.applications.keys():
            del applications[name]
        _merge(bundle, typing.cast(pathlib.Path, defaults), document)
    for file in overlays:
        for document in _parse(file):
            if defaults is not None:
                _refuse_machines(bundle, file, document)
            _merge(bundle, file, document)
    return bundle


def _refuse_machines(bundle: Bundle, file: pathlib.Path, document: _Mapping) -> None:
    """Refuse what is asked of a cloud's machines, and bases that the bundle itself does not name."""
    bases = {app.body.get("base") for app in bundle.applications.values()}
    applications = _entries(file, document, "applications")
    for name in applications:
        body, what, key = _entries(file, applications, name, f"application {name!r}"), "", "constraints"
        if found := body.get(key):
            hosts = "the sandbox's hosts are containers on this machine"
            what = f"constraints {found!r} are for Juju's machines; {hosts}"
        elif (found := body.get(key := "base")) and found not in bases:
            what = f"base {found!r} is for Juju's machines; the sandbox's hosts all have one base"
        if what:
            where = Where(file, body.lines[key])
            raise BundleError(where, f"application {name!r}: {what}: leave this overlay out here")


def _parse(file: pathlib.Path) -> list[_Mapping]:
    try:
        loader: typing.Any = _Loader(file.read_text())
    except OSError as e:
        raise SandboxError(f"{file}: {e.strerror}") from e
    loader.file = file
    documents: list[typing.Any] = []
    try:
        while loader.check_data():
            documents.append(loader.get_data())
    except yaml.MarkedYAMLError as e:
        line = e.problem_mark.line + 1 if e.problem_mark else 1
        if "FILL-IN" in str(e.problem):  # an alias without an anchor, which Juju's reader refuses as well
            raise BundleError(Where(file, line), "is not filled in yet: put a value in the place of *FILL-IN") from e
        raise BundleError(Where(file, line), f"not YAML: {e.problem}") from e
    if not all(isinstance(document, _Mapping) for document in documents):
        raise BundleError(Where(file, 1), "a bundle is a mapping")
    return documents


def _merge(bundle: Bundle, file: pathlib.Path, document: _Mapping) -> None:
    for key, line in document.lines.items():
        if key not in _BUNDLE_KEYS:
            raise BundleError(Where(file, line), f"unknown key {key!r}{_guess(key, _BUNDLE_KEYS)}")
    if "machines" in document:
        where = Where(file, document.lines["machines"])
        raise BundleError(where, "the sandbox gives every unit a host of its own: no machines section")
    bundle.name = str(document.get("name", bundle.name))
    applications = _entries(file, document, "applications")
    for name, body in applications.items():
        if body is not None:
            _merge_application(bundle, file, name, applications)
            continue
        if name not in bundle.applications:
            where = Where(file, applications.lines[name])
            raise BundleError(where, f"application {name!r} cannot be removed: there is none of that name")
        del bundle.applications[name]
        bundle.relations = [
            relation for relation in bundle.relations if all(end.split(":")[0] != name for end in relation.ends)
        ]
    relations = document.get("relations") or _Sequence()
    if not isinstance(relations, _Sequence):
        raise BundleError(Where(file, document.lines["relations"]), "relations is a list")
    for ends, line in zip(relations, getattr(relations, "lines", []), strict=True):
        match ends:
            case [str(first), str(second)]:
                bundle.relations.append(BundleRelation((first, second), Where(file, line)))
            case _:
                raise BundleError(Where(file, line), "a relation is a list of two application:endpoint")


def _merge_application(bundle: Bundle, file: pathlib.Path, name: str, applications: _Mapping) -> None:
    where = Where(file, applications.lines[name])
    body = _entries(file, applications, name, f"application {name!r}")
    app = bundle.applications.get(name) or BundleApplication(name, {}, {"": where}, "")
    for key, value in body.items():
        at = Where(file, body.lines[key])
        if key not in _APPLICATION_KEYS:
            raise BundleError(at, f"application {name!r}: unknown key {key!r}{_guess(key, _APPLICATION_KEYS)}")
        app.where[key] = at
        if key not in _MERGED:
            app.body[key] = value
            continue
        merged = app.body.setdefault(key, {})
        items = _entries(file, body, key, f"application {name!r}: {key}")
        for item, given in items.items():
            is_path = key == "resources" and isinstance(given, str)
            merged[item] = str((file.parent / given).resolve()) if is_path else given
            app.where[f"{key}.{item}"] = Where(file, items.lines[item])
    if "charm" in body:
        charm = str(body["charm"])
        app.charm = str((file.parent / charm).resolve()) if charm.startswith((".", "/")) else charm
    if not app.charm:
        raise BundleError(
            where, f"application {name!r} has no charm (and no application of that name stands before it)"
        )
    bundle.applications[name] = app


def check(bundle: Bundle, metadata: collections.abc.Mapping[str, dict[str, typing.Any]]) -> None:
    """Check options, units and relations against the charms' metadata (application -> charmcraft.yaml).

    Raises:
        BundleError: with the line of the first mistake, what is wrong and what exists instead.
    """
    for app in bundle.applications.values():
        _check_options(app, metadata[app.name])
        _check_units(app, metadata[app.name])
        _check_actions(app, metadata[app.name])
        known = section(metadata[app.name], "resources")
        for resource, path in app.body.get("resources", {}).items():
            if resource not in known:
                raise BundleError(
                    app.at(f"resources.{resource}"), f"{app.name} has no resource {resource!r}{_guess(resource, known)}"
                )
            if isinstance(path, str) and not pathlib.Path(path).is_file():
                raise BundleError(app.at(f"resources.{resource}"), f"resource {resource!r}: no file {path}")
    for relation in bundle.relations:
        check_relation(relation.ends, metadata, relation.where)


def _check_units(app: BundleApplication, metadata: dict[str, typing.Any]) -> None:
    units = app.body.get("num_units")
    if metadata.get("subordinate"):
        if units:
            raise BundleError(app.at("num_units"), f"{app.name} is subordinate: it has no num_units")
    elif not isinstance(units, int) or isinstance(units, bool) or not 0 <= units <= 64:
        raise BundleError(app.at("num_units", "charm"), f"{app.name}: num_units must be a number from 0 to 64")
    if "to" in app.body:
        raise BundleError(app.at("to"), f"{app.name}: the sandbox gives every unit a host of its own: no placement")


def _check_actions(app: BundleApplication, metadata: dict[str, typing.Any]) -> None:
    """Check what decides under which lock an action runs."""
    for name, action in section(metadata, "actions").items():
        parallel: object = (action or {}).get("parallel", False)
        if not isinstance(parallel, bool):
            raise BundleError(
                app.at("charm"), f"{app.name}: action {name}: parallel is true or false, not {parallel!r}"
            )
        if "execution-group" in (action or {}):
            raise BundleError(app.at("charm"), f"{app.name}: action {name}: the sandbox knows no execution-group")


def _check_options(app: BundleApplication, metadata: dict[str, typing.Any]) -> None:
    declared = section(section(metadata, "config"), "options")
    for option, value in app.body.get("options", {}).items():
        where = app.at(f"options.{option}")
        problem = option_problem(option, value, declared)
        if problem:
            raise BundleError(where, f"{app.name}: {problem}")


def option_problem(
    option: str, value: object, declared: collections.abc.Mapping[str, dict[str, typing.Any]]
) -> str | None:
    """Return the mistake in setting `option` to `value`, or None."""
    if option not in declared:
        return f"no option {option!r}{_guess(option, declared)}"
    kind = declared[option]["type"]
    fits = isinstance(value, _OPTION_TYPES[kind]) and (kind == "boolean" or not isinstance(value, bool))
    return None if fits else f"option {option!r} is a {kind}, not {value!r}"


def check_relation(
    ends: tuple[str, str], metadata: collections.abc.Mapping[str, dict[str, typing.Any]], where: Where | None = None
) -> tuple[tuple[str, str], tuple[str, str], str, bool]:
    """Return (provider end, requirer end, interface, container scope) of a relation, or raise what is wrong with it."""
    sides: list[tuple[str, str, dict[str, typing.Any]]] = []
    for end in ends:
        app, _, endpoint = end.partition(":")
        if app not in metadata:
            _fail(where, f"relation {list(ends)}: no application {app!r}{_guess(app, metadata)}")
        endpoints = endpoints_of(metadata[app])
        if not endpoint:
            _fail(where, f"relation {list(ends)}: name the endpoint of {app} ({', '.join(endpoints)})")
        if endpoint not in endpoints:
            _fail(where, f"{app} has no endpoint {endpoint!r}{_guess(endpoint, endpoints)}")
        sides.append((app, endpoint, endpoints[endpoint]))
    (app_a, endpoint_a, a), (app_b, endpoint_b, b) = sides
    if a["interface"] != b["interface"]:
        _fail(where, f"{ends[0]} speaks {a['interface']}, {ends[1]} speaks {b['interface']}: they cannot be related")
    if {a["role"], b["role"]} != {"provides", "requires"}:
        _fail(where, f"{ends[0]} and {ends[1]} both {a['role'][:-1]} {a['interface']}: one must provide, one require")
    container = "container" in (a["scope"], b["scope"])
    if container and not (metadata[app_a].get("subordinate") or metadata[app_b].get("subordinate")):
        _fail(where, f"{ends[0]} and {ends[1]} live in one container, but neither charm is subordinate")
    first, second = ((app_a, endpoint_a), (app_b, endpoint_b))
    return (
        (first, second, a["interface"], container)
        if a["role"] == "provides"
        else (second, first, a["interface"], container)
    )


def endpoints_of(metadata: dict[str, typing.Any]) -> dict[str, dict[str, str]]:
    """Return {endpoint: {role, interface, scope}} of a charm, with the `juju-info` that every charm provides."""
    found = {"juju-info": {"role": "provides", "interface": "juju-info", "scope": "global"}}
    for role in ("provides", "requires"):
        for name, spec in section(metadata, role).items():
            found[name] = {"role": role, "interface": spec["interface"], "scope": spec.get("scope", "global")}
    return found


def _fail(where: Where | None, message: str) -> typing.NoReturn:
    raise BundleError(where, message) if where else SandboxError(message)


def _guess(name: str, known: collections.abc.Iterable[str]) -> str:
    known = list(known)
    close = difflib.get_close_matches(name, known, n=1)
    if close:
        return f": did you mean {close[0]!r}?"
    return f" (there are: {', '.join(sorted(known))})" if known else " (it has none)"
