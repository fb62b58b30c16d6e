"""A unit's metrics for Prometheus, served on the loopback while a collector is related.

A charm's metrics.py is the service's program: it calls `serve` with its sources. Each source is
read on a separate thread, so that a scrape ends in time even if one hangs. One that fails makes its
`slurm_ddp_NAME_up` 0.
"""

import collections.abc
import concurrent.futures
import contextlib
import dataclasses
import hashlib
import json
import logging
import pathlib
import socket
import sys
import threading
import time
import typing

import prometheus_client
from prometheus_client import core, registry

from slurm_ddp import files, systemd
from slurm_ddp.charm import StatusError
from slurm_ddp.commands import CommandError
from slurm_ddp.interfaces import cos_agent

STATE = pathlib.Path("/var/lib/slurm-ddp-exporter")
PREFIX = "slurm_ddp_"
_FIRST_PORT, _NUM_PORTS = 9701, 200
_SCRAPE_S = 7.0  # Prometheus itself waits 10 s by default
_FRESH_S = 120.0  # for how long the last result of a slow source is served
_SERVICE = pathlib.Path(__file__).with_name("exporter.service")  # a text for str.format
Samples = collections.abc.Iterable[tuple[collections.abc.Mapping[str, str], float]]
logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Source:
    """Something that metrics are read from; it is down when a read raises or takes too long."""

    name: str  # of its metric slurm_ddp_NAME_up
    read: collections.abc.Callable[[], collections.abc.Iterable[core.Metric]]
    labels: collections.abc.Mapping[str, str] = dataclasses.field(default_factory=dict[str, str])


def follow(
    charm: typing.Any, serve: collections.abc.Callable[[str, cos_agent.Topology], dict[str, str]]
) -> None:
    """Serve and publish the unit's metrics, or remove the service without a related collector.

    Args:
        charm: an ops.CharmBase.
        serve: starts the service of a unit, and returns its databag; may raise CommandError or
            StatusError.
    """
    # Before the collector's unit has joined, Juju may know no databag of this unit
    related = [one for one in charm.model.relations[cos_agent.ENDPOINT] if one.active and one.units]
    if not related:
        ensure_none(charm.unit.name)
        return
    topology = cos_agent.Topology(
        charm.model.name, charm.model.uuid, charm.app.name, charm.meta.name
    )
    try:
        data = serve(charm.unit.name, topology)
    except (CommandError, StatusError) as e:  # the unit's own work goes on without metrics
        logger.warning("%s has no metrics: %s", charm.unit.name, e)
        return
    for relation in related:
        relation.data[charm.unit].update(data)


def events(on: typing.Any) -> tuple[typing.Any, ...]:
    """Return the events of a charm's relation with a collector."""
    collector = on[cos_agent.ENDPOINT]
    return collector.relation_joined, collector.relation_changed, collector.relation_broken


def ensure(unit: str, program: pathlib.Path, settings: collections.abc.Mapping[str, object]) -> int:
    """Run `program` with these settings, which may hold secrets; return its port.

    Raises:
        CommandError: the service does not start, or there is no free port.
    """
    path = _settings(unit)
    port = _port(path)
    text = json.dumps({"port": port, **settings}, sort_keys=True) + "\n"
    changed = files.ensure_file(path, text, mode=0o600)
    # The charm's own folders: its packages are the interpreter's
    library = f"{pathlib.Path(__file__).resolve().parents[1]}:{program.parent}"
    place = {"program": program, "path": library, "python": sys.executable, "settings": path}
    service = _SERVICE.read_text().format(unit=unit, digest=_digest(program), **place)
    changed |= systemd.ensure_unit(service_name(unit), service)
    if not systemd.is_active(service_name(unit)):
        systemd.enable_now(service_name(unit))
    elif changed:
        systemd.restart(service_name(unit))
    return port


def ensure_none(unit: str) -> None:
    """Stop the service of the unit, and remove its files."""
    if _settings(unit).exists():
        systemd.ensure_no_unit(service_name(unit))
        files.ensure_absent(_settings(unit))
        files.ensure_absent(memory(unit))


def memory(unit: str) -> pathlib.Path:
    """Return the file for state that must survive a restart of the service."""
    return _settings(unit).with_suffix(".kept")


def service_name(unit: str) -> str:
    """Name the unit's service."""
    return f"slurm-ddp-exporter-{unit.replace('/', '-')}.service"


def gauge(name: str, text: str, samples: Samples) -> core.Metric:
    """Make a metric that goes up and down."""
    return _metric(core.GaugeMetricFamily, name, text, samples)


def counter(name: str, text: str, samples: Samples) -> core.Metric:
    """Make a metric that only grows; its name ends with _total."""
    return _metric(core.CounterMetricFamily, name, text, samples)


def serve(
    sources: collections.abc.Callable[[dict[str, typing.Any]], collections.abc.Sequence[Source]],
) -> typing.NoReturn:
    """Run the service until it is killed.

    The command line names its settings file, which has the port.
    """
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    settings: dict[str, typing.Any] = json.loads(pathlib.Path(sys.argv[1]).read_text())
    collected = registry.CollectorRegistry(auto_describe=False)
    collected.register(Collector(sources(settings)))
    prometheus_client.start_http_server(settings["port"], addr="127.0.0.1", registry=collected)
    threading.Event().wait()
    raise SystemExit(0)


class Collector(registry.Collector):
    """Reads all sources at each scrape, side by side."""

    def __init__(
        self, sources: collections.abc.Sequence[Source], *, timeout_s: float = _SCRAPE_S
    ) -> None:
        self._readers = [_Reader(source) for source in sources]
        self._timeout_s = timeout_s

    def collect(self) -> collections.abc.Iterator[core.Metric]:
        """Return the metrics of all sources that answer in time, and of each whether it does."""
        running = [reader.begin() for reader in self._readers]
        concurrent.futures.wait(running, self._timeout_s)
        for reader, future in zip(self._readers, running, strict=True):
            found = reader.result(future)
            yield from found or ()
            up = [(reader.source.labels, float(found is not None))]
            yield gauge(
                f"{reader.source.name}_up", "Whether the source of these metrics answers.", up
            )


class _Reader:
    """Reads one source, in one thread at a time."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self._lock = threading.Lock()
        self._running: concurrent.futures.Future[list[core.Metric]] | None = None
        self._last: tuple[float, list[core.Metric]] = (float("-inf"), [])

    def begin(self) -> "concurrent.futures.Future[list[core.Metric]]":
        """Begin to read, unless a read is under way."""
        with self._lock:
            if self._running is None or self._running.done():
                self._running = concurrent.futures.Future()
                threading.Thread(target=self._read, args=(self._running,), daemon=True).start()
            return self._running

    def _read(self, future: "concurrent.futures.Future[list[core.Metric]]") -> None:
        try:
            found = list(self.source.read())
        except BaseException as e:  # the other sources' metrics are served nevertheless
            logger.warning("%s: %s: %s", self.source.name, type(e).__name__, e)
            # A failure that came too late for its own scrape shows in the next one
            self._last = (float("-inf"), [])
            future.set_exception(e)
        else:
            self._last = (time.monotonic(), found)
            future.set_result(found)

    def result(
        self, future: "concurrent.futures.Future[list[core.Metric]]"
    ) -> list[core.Metric] | None:
        """Return the metrics, or the last ones while a read goes on if they are fresh, or None."""
        if future.done():
            return None if future.exception() else future.result()
        at, found = self._last
        return found if time.monotonic() - at < _FRESH_S else None


def _metric(kind: typing.Any, name: str, text: str, samples: Samples) -> core.Metric:
    listed = list(samples)
    labels = list(listed[0][0]) if listed else []
    made = kind(f"{PREFIX}{name}", text, labels=labels)
    for given, value in listed:
        made.add_metric([given[label] for label in labels], value)
    return made


def _settings(unit: str) -> pathlib.Path:
    return STATE / f"{unit.replace('/', '-')}.json"


def _port(path: pathlib.Path) -> int:
    """Return the port in the file, or else the first free one that no other unit has."""
    known: dict[pathlib.Path, int] = {}
    for file in STATE.glob("*.json"):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            known[file] = int(json.loads(file.read_text())["port"])
    if path in known:
        return known[path]
    for port in range(_FIRST_PORT, _FIRST_PORT + _NUM_PORTS):
        if port not in known.values() and _is_free(port):
            return port
    raise CommandError(f"no port from {_FIRST_PORT} to {_FIRST_PORT + _NUM_PORTS - 1} is free")


def _is_free(port: int) -> bool:
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True


def _digest(program: pathlib.Path) -> str:
    """Fingerprint the charm's sources, so that an upgrade restarts the service."""
    found = hashlib.sha256()
    for folder in (program.parent, pathlib.Path(__file__).parent):
        for path in sorted([*folder.rglob("*.py"), *folder.rglob("*.yaml")]):
            found.update(path.read_bytes())
    return found.hexdigest()[:16]
