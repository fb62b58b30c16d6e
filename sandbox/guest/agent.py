"""The part that runs inside a host: it runs one charm's class for one event, with real effects.

`python agent.py` reads one request a line on standard input and answers with lines of JSON on
standard output. Each event runs in its own process, forked from one that has imported the unit's
charm, so an event pays for neither an interpreter's start nor the imports, and sees nothing that
another left in memory. This file imports nothing from the sandbox: a host needs no other file of
it.

Answers while a hook runs: {"kind": "status" | "log" | "action-log", ...}; and one at its end:
{"kind": "result", ...}.
"""

# Scenario has no public API for a unit agent's work: this uses its internals, pinned by a hash.
# pyright: reportPrivateUsage=false, reportAttributeAccessIssue=false

import contextlib
import dataclasses
import importlib
import inspect
import json
import logging
import os
import pathlib
import shutil
import signal
import socket
import sys
import traceback
import typing

import ops
import scenario._runtime
import scenario.mocking
import yaml
from ops import testing

AGENTS = pathlib.Path("/var/lib/juju/agents")
STORAGE = pathlib.Path("/var/lib/juju/storage")
_PORTS = {"tcp": testing.TCPPort, "udp": testing.UDPPort}
_UNDECLARED = logging.getLogger("scenario")
# What most charms import of the environment they share: imported once here, not in each event's
# child
_SHARED = ("pydantic.main", "pydantic.types", "prometheus_client", "jinja2", "slurmutils", "dotenv")

# Scenario writes and reads charmcraft.yaml for every event; with pure Python that would take most
# of an event's time
yaml.SafeLoader, yaml.SafeDumper = yaml.CSafeLoader, yaml.CSafeDumper

Json = dict[str, typing.Any]


def main() -> None:
    """Serve requests until standard input ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # a charm's prints go to the log, not into the protocol
    for name in _SHARED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    zygotes: dict[str, _Zygote] = {}  # by unit
    for line in sys.stdin:
        request = json.loads(line)
        unit, source = request["unit"], request["source"]
        if unit not in zygotes or zygotes[unit].source != source:
            if unit in zygotes:
                zygotes.pop(unit).close()
            zygotes[unit] = _Zygote(unit, source, answers)
        status = zygotes[unit].run(line)
        if status != 0:
            message = f"the hook's process ended with wait status {status}"
            answers.write(
                json.dumps({"kind": "result", "ok": False, "error": message, "trace": message})
                + "\n"
            )
    for zygote in zygotes.values():
        zygote.close()


class _Zygote:
    """A process that has imported a unit's charm, and forks for each event."""

    def __init__(self, unit: str, source: str, answers: typing.TextIO) -> None:
        self.source = source
        self._socket, theirs = socket.socketpair()
        self._pid = os.fork()
        if self._pid == 0:
            self._socket.close()  # so it ends with the agent: the youngest first, which has copies of the others
            _breed(unit, source, answers, theirs.makefile("rw"))
            os._exit(0)
        theirs.close()
        self._connection = self._socket.makefile("rw")

    def run(self, line: str) -> int:
        """Have a request answered; return the wait status of the process that did it."""
        self._connection.write(line)
        self._connection.flush()
        return int(self._connection.readline() or -1)

    def close(self) -> None:
        """End the process: it runs no event now."""
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)


def _breed(unit: str, source: str, answers: typing.TextIO, connection: typing.TextIO) -> None:
    """Answer each request in a fork of this process, and report its wait status."""
    with contextlib.suppress(BaseException):  # the event does it again, and reports what fails
        _load_charm(unit, source)
    for line in connection:
        pid = os.fork()
        if pid == 0:
            _serve(json.loads(line), answers)
            os._exit(0)
        connection.write(f"{os.waitpid(pid, 0)[1]}\n")
        connection.flush()


def _serve(request: Json, answers: typing.TextIO) -> None:
    def send(kind: str, **fields: typing.Any) -> None:
        answers.write(json.dumps({"kind": kind, **fields}) + "\n")
        answers.flush()

    try:
        result = _dispatch(request, send)
    except BaseException as e:  # the only place that turns a hook's failure into an answer
        cause = e.__cause__ or e
        result = {
            "ok": False,
            "error": f"{type(cause).__name__}: {cause}",
            "trace": traceback.format_exc(),
        }
    send("result", **result)


def _dispatch(request: Json, send: typing.Callable[..., None]) -> Json:
    charm_root, charm = _load_charm(request["unit"], request["source"])
    _patch_backend(send)
    _patch_remote_unit(request["event"])
    app, number = request["unit"].split("/")
    context = _Context(
        charm,
        meta=_metadata(charm_root, request["event"].get("action") or {}),
        charm_root=charm_root,
        juju_version=request["juju"],
        app_name=app,
        unit_id=int(number),
        machine_id=request["machine_id"],
        principal_unit=request["principal"],
    )
    before = _build_state(request["state"])
    failure = None
    after: typing.Any
    try:
        after = context.run(_build_event(request["event"], before, context), before)
    except testing.ActionFailed as e:
        after, failure = e.state, e.message
    finally:
        context.close()
    action = (
        {"results": context.action_results or {}, "failure": failure}
        if request["event"].get("action")
        else None
    )
    return {"ok": True, "state": _describe_state(after), "action": action}


def _metadata(charm_root: pathlib.Path, action: Json) -> Json:
    """Read a charm's metadata, without lists of types, which Scenario does not support."""
    found: Json = yaml.safe_load((charm_root / "charmcraft.yaml").read_text())
    actions: dict[str, Json] = found.get("actions") or {}
    for name, declared in actions.items():
        values: Json = action.get("params", {}) if name == action.get("name") else {}
        parameters: dict[str, Json] = (declared or {}).get("params") or {}
        for parameter, schema in parameters.items():
            if isinstance(schema.get("type"), list):
                schema["type"] = "integer" if isinstance(values.get(parameter), int) else "string"
    return found


def _install_charm(source: pathlib.Path, charm_root: pathlib.Path) -> None:
    """Give the unit its own copy of the charm, and replace one of another revision."""
    stamp = charm_root / ".source"
    if stamp.exists() and stamp.read_text() == str(source):
        return
    shutil.rmtree(charm_root, ignore_errors=True)
    shutil.copytree(source, charm_root)
    stamp.write_text(str(source))


def _load_charm(unit: str, source: str) -> tuple[pathlib.Path, type[ops.CharmBase]]:
    """Return the unit's folder and its charm's class, in the environment that hooks have."""
    os.environ.clear()
    os.environ.update(
        PATH="/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        LANG="C.UTF-8",
        HOME="/root",
    )
    _UNDECLARED.setLevel(logging.ERROR)
    charm_root = AGENTS / f"unit-{unit.replace('/', '-')}" / "charm"
    _install_charm(pathlib.Path(source), charm_root)
    os.chdir(charm_root)
    sys.path[:0] = [str(charm_root / "lib"), str(charm_root / "src")]
    module = importlib.import_module("charm")
    classes = [
        item
        for item in vars(module).values()
        if inspect.isclass(item) and issubclass(item, ops.CharmBase) and item.__module__ == "charm"
    ]
    if not classes:
        raise RuntimeError("src/charm.py defines no charm class")
    return charm_root, classes[-1]


class _Context(testing.Context[ops.CharmBase]):
    """Scenario's context with storages at a unit's paths, not in a temporary directory."""

    def _get_storage_root(self, name: str, index: int) -> pathlib.Path:
        location = STORAGE / f"{name}-{index}"
        location.mkdir(parents=True, exist_ok=True)
        return location


def _patch_backend(send: typing.Callable[..., None]) -> None:
    """Make Scenario's model backend act as Juju does, and send progress while a hook runs."""
    backend = scenario.mocking._MockModelBackend
    status_set, secret_set, resource_get = (
        backend.status_set,
        backend.secret_set,
        backend.resource_get,
    )

    def sent_status_set(
        self: typing.Any, status: typing.Any, message: str = "", *, is_app: bool = False
    ) -> None:
        status_set(self, status, message, is_app=is_app)
        if not is_app:
            send("status", status=status, message=message)

    def sent_action_log(self: typing.Any, message: str) -> None:
        self._context.action_logs.append(message)
        send("action-log", message=message)

    def changed_secret_set(
        self: typing.Any,
        id: str,  # noqa: A002 - as ops calls it
        *,
        content: dict[str, str] | None = None,
        **rest: typing.Any,
    ):
        # Juju 3.6 makes no new revision of equal content (storing its checksum); Scenario does
        if (
            content is not None
            and content == self._get_secret(id, rest.get("label")).latest_content
        ):
            content = None
            if not any(rest.values()):
                return
        latest = self._get_secret(id, rest.get("label"))._latest_revision
        secret_set(self, id, content=content, **rest)
        if content is None:
            object.__setattr__(self._get_secret(id, rest.get("label")), "_latest_revision", latest)

    def found_resource_get(self: typing.Any, resource_name: str) -> str:
        if not any(resource.name == resource_name for resource in self._state.resources):
            raise ops.ModelError(f"ERROR resource {resource_name!r} has no content: attach it")
        return resource_get(self, resource_name)

    backend.status_set = sent_status_set
    backend.action_log = sent_action_log
    backend.juju_log = lambda _, level, message: send("log", level=level, message=message)
    backend.secret_set = changed_secret_set
    backend.resource_get = found_resource_get


def _patch_remote_unit(event: Json) -> None:
    """Name the unit that leaves, and none if an application's data changed."""
    runtime: typing.Any = scenario._runtime.Runtime
    event_env = runtime._get_event_env

    def named(self: typing.Any, **arguments: typing.Any) -> dict[str, str]:
        env = event_env(self, **arguments)
        if not event["remote"] and "JUJU_REMOTE_UNIT" in env:
            env["JUJU_REMOTE_UNIT"] = ""
        return env | (
            {"JUJU_DEPARTING_UNIT": event["departing"]}
            if event["kind"] == "relation-departed"
            else {}
        )

    runtime._get_event_env = named


def _build_state(described: Json) -> testing.State:
    address = described["address"]
    networks = {
        testing.Network(
            name,
            [
                testing.BindAddress(
                    [testing.Address(address, cidr=described["cidr"])], interface_name="host0"
                )
            ],
            ingress_addresses=[address],
            egress_subnets=[f"{address}/32"],
        )
        for name in described["bindings"]
    }
    return testing.State(
        config=described["config"],
        leader=described["leader"],
        relations={_build_relation(relation) for relation in described["relations"]},
        secrets={_build_secret(secret) for secret in described["secrets"]},
        storages={testing.Storage(name, index=index) for name, index in described["storages"]},
        resources={
            testing.Resource(name=name, path=path) for name, path in described["resources"].items()
        },
        networks=networks,
        opened_ports={_PORTS[protocol](port) for protocol, port in described["ports"]},
        unit_status=ops.StatusBase.from_name(*described["status"]),
        app_status=ops.StatusBase.from_name(*described["app_status"]),
        workload_version=described["version"],
        planned_units=described["planned_units"],
        deferred=[testing.DeferredEvent(**event) for event in described["deferred"]],
        stored_states={testing.StoredState(**stored) for stored in described["stored"]},
        model=testing.Model(
            described["model"]["name"], uuid=described["model"]["uuid"], type="lxd"
        ),
    )


def _build_relation(described: Json) -> testing.RelationBase:
    common = {
        "endpoint": described["endpoint"],
        "id": described["id"],
        "local_app_data": described["local_app_data"],
        "local_unit_data": described["local_unit_data"],
    }
    units = {int(number): data for number, data in described["remote_units_data"].items()}
    if described["type"] == "peer":
        return testing.PeerRelation(**common, peers_data=units)
    remote = {
        "remote_app_name": described["remote_app"],
        "remote_app_data": described["remote_app_data"],
    }
    if described["type"] == "subordinate":
        ((number, data),) = units.items()
        return testing.SubordinateRelation(
            **common, **remote, remote_unit_id=number, remote_unit_data=data
        )
    return testing.Relation(**common, **remote, remote_units_data=units)


def _build_secret(described: Json) -> testing.Secret:
    secret = testing.Secret(
        described["tracked_content"],
        latest_content=described["latest_content"],
        id=described["id"],
        owner=described["owner"],
        label=described["label"],
        remote_grants={
            int(relation): grantees for relation, grantees in described["grants"].items()
        },
    )
    object.__setattr__(secret, "_tracked_revision", described["tracked_revision"])
    object.__setattr__(secret, "_latest_revision", described["latest_revision"])
    return secret


def _build_event(described: Json, state: testing.State, context: _Context) -> typing.Any:
    kind: str = described["kind"]
    make: typing.Any = getattr(context.on, kind.replace("-", "_"))
    if kind == "action":
        action = described["action"]
        return make(action["name"], params=action["params"], id=action["id"])
    if kind.startswith("relation-"):
        relation = state.get_relation(described["relation"])
        if kind in ("relation-created", "relation-broken"):
            return make(relation)
        number = int(described["remote"].split("/")[1]) if described["remote"] else 0
        return make(
            relation, remote_unit=number
        )  # Scenario wants one; see _patch_remote_unit for the charm's view
    if kind.startswith("secret-"):
        # Made by hand: Scenario denies it to the followers of an owning application
        return type(context.on.start())(
            "secret_changed", secret=state.get_secret(id=described["secret"])
        )
    if kind.startswith("storage-"):
        name, index = described["storage"]
        return make(state.get_storage(name, index=index))
    return make()


def _describe_state(state: testing.State) -> Json:
    return {
        "status": [state.unit_status.name, state.unit_status.message],
        "app_status": [state.app_status.name, state.app_status.message],
        "version": state.workload_version,
        "ports": sorted([port.protocol, port.port] for port in state.opened_ports),
        "relations": {
            str(relation.id): {
                "app": dict(relation.local_app_data),
                "unit": dict(relation.local_unit_data),
            }
            for relation in state.relations
        },
        "secrets": [_describe_secret(secret) for secret in state.secrets],
        "deferred": [dataclasses.asdict(event) for event in state.deferred],
        "stored": [
            {"name": stored.name, "owner_path": stored.owner_path, "content": dict(stored.content)}
            for stored in state.stored_states
        ],
    }


def _describe_secret(secret: testing.Secret) -> Json:
    return {
        "id": secret.id,
        "owner": secret.owner,
        "label": secret.label,
        "tracked_revision": secret._tracked_revision,
        "latest_revision": secret._latest_revision,
        "latest_content": dict(secret.latest_content or {}),
        "grants": {
            str(relation): sorted(grantees) for relation, grantees in secret.remote_grants.items()
        },
    }


if __name__ == "__main__":
    main()
