"""The metrics of the volume: the metadata engine's values, and this unit's last backup."""

import collections.abc
import dataclasses
import pathlib
import re
import socket
import typing

from prometheus_client import core

import embedded.store
from slurm_ddp import exporter, juicefs, juicefs_access
from slurm_ddp.exporter import gauge
from slurm_ddp.interfaces import cos_agent
from slurm_ddp.interfaces import filesystem_info as fs
from volume.target import Target

_STATUS_S, _REDIS_S = 5.0, 2.0
_REPLY_BYTES = 1 << 16


def ensure(unit: str, topology: cos_agent.Topology, volume: Target) -> dict[str, str]:
    """Serve the unit's metrics; return its databag of the relation. Raises CommandError."""
    program = pathlib.Path(__file__).resolve()
    is_server = embedded.store.is_enabled(topology.application)
    settings = {
        "volume": volume.volume.name,
        "program": str(volume.program),
        "engine": dataclasses.asdict(volume.access.engine),
        "url": volume.access.url,
        "environment": volume.access.environment,
        "secrets": volume.access.secrets,
        "backups": str(volume.directory / "backups"),
        "redis": fs.reveal(volume.credentials.meta_password) if is_server else "",
    }
    port = exporter.ensure(unit, program, settings)
    return cos_agent.dump(
        topology, [cos_agent.Job("volume", port, socket.gethostname())], program.parent / "cos"
    )


def sources(settings: dict[str, typing.Any]) -> list[exporter.Source]:
    """List the sources of a scrape."""
    labels = {"volume": settings["volume"]}
    engine = juicefs_access.Engine(
        **settings["engine"] | {"hosts": tuple(settings["engine"]["hosts"])}
    )
    access = juicefs_access.Access(
        engine, settings["url"], settings["environment"], secrets=tuple(settings["secrets"])
    )
    found = [
        exporter.Source(
            "volume", lambda: read(pathlib.Path(settings["program"]), access, labels), labels
        ),
        exporter.Source(
            "backups", lambda: backups(pathlib.Path(settings["backups"]), labels), labels
        ),
    ]
    if settings["redis"]:
        found.append(exporter.Source("engine", lambda: memory(settings["redis"], labels), labels))
    return found


def read(
    program: pathlib.Path, access: juicefs_access.Access, labels: dict[str, str]
) -> collections.abc.Iterator[core.Metric]:
    """Ask the engine for its volume. Raises JuicefsError."""
    setting = juicefs.inspect(program, access, timeout=_STATUS_S)
    if setting is None:
        raise juicefs.JuicefsError("the metadata engine holds no volume")
    values = {
        "volume_used_bytes": ("Bytes in the volume.", setting.used_bytes),
        "volume_used_inodes": ("Files and folders in the volume.", setting.used_inodes),
        "volume_sessions": ("Clients that have the volume mounted.", len(setting.clients)),
        "volume_trash_days": ("Days that deleted files are kept.", setting.trash_days),
    }
    if setting.capacity_gib:
        values["volume_capacity_bytes"] = (
            "Bytes that the volume may hold.",
            setting.capacity_gib << 30,
        )
    for name, (text, value) in values.items():
        yield gauge(name, text, [(labels, value)])


def backups(folder: pathlib.Path, labels: dict[str, str]) -> collections.abc.Iterator[core.Metric]:
    """Find the last backup of the metadata on this unit."""
    newest = max((path.stat().st_mtime for path in folder.glob("*.json.gz")), default=0.0)
    text = "When the metadata was backed up last on this unit; 0: never."
    yield gauge("volume_backup_timestamp_seconds", text, [(labels, newest)])


def memory(password: str, labels: dict[str, str]) -> collections.abc.Iterator[core.Metric]:
    """Ask the Redis of this unit for its memory. Raises OSError or ValueError."""
    with socket.create_connection(
        ("127.0.0.1", embedded.store.METADATA_PORT), timeout=_REDIS_S
    ) as connection:
        connection.sendall(f"AUTH {password}\r\nINFO memory\r\nQUIT\r\n".encode())
        reply = b""
        while len(reply) < _REPLY_BYTES and (data := connection.recv(_REPLY_BYTES)):
            reply += data
    found = dict(
        re.findall(
            r"^(used_memory|maxmemory):(\d+)\r?$", reply.decode(errors="replace"), re.MULTILINE
        )
    )
    if len(found) != 2:
        raise ValueError("Redis did not report its memory")
    yield gauge(
        "engine_memory_bytes",
        "Memory that the metadata engine uses.",
        [(labels, int(found["used_memory"]))],
    )
    limit = "Memory that the metadata engine may use; 0: no limit."
    yield gauge("engine_memory_limit_bytes", limit, [(labels, int(found["maxmemory"]))])


if __name__ == "__main__":  # pragma: no cover
    exporter.serve(sources)
