"""The exporter: its service, its port, and scrapes that end in time with any source."""

import collections.abc
import json
import pathlib
import socket
import threading

import pytest
from prometheus_client import core, exposition, registry

from machine import Machine
from slurm_ddp import exporter
from slurm_ddp.commands import CommandError
from slurm_ddp.exporter import Source, gauge

UNIT, NAME = "trainer/0", "slurm-ddp-exporter-trainer-0.service"
SETTINGS = "trainer-0.json"


@pytest.fixture
def services(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> Machine:
    double = Machine()
    double.take_over(monkeypatch, [], tmp_path / "units")
    monkeypatch.setattr(exporter, "STATE", tmp_path / "state")
    return double


@pytest.fixture
def program(tmp_path: pathlib.Path) -> pathlib.Path:
    path = tmp_path / "src" / "metrics.py"
    path.parent.mkdir()
    path.write_text("first\n")
    return path


def test_the_service_runs_the_charms_program_with_its_settings(
    services: Machine, program: pathlib.Path, tmp_path: pathlib.Path
):
    port = exporter.ensure(UNIT, program, {"app": "trainer", "password": "hunter2"})
    settings = tmp_path / "state" / SETTINGS
    assert json.loads(settings.read_text()) == {
        "port": port,
        "app": "trainer",
        "password": "hunter2",
    }
    assert settings.stat().st_mode & 0o777 == 0o600
    text = (tmp_path / "units" / NAME).read_text()
    assert f" -B {program} {settings}\n" in text
    assert f"PYTHONPATH={pathlib.Path(exporter.__file__).parents[1]}:{program.parent}\n" in text
    assert f"ConditionPathExists={program}\n" in text
    assert "hunter2" not in text
    assert (services.did("enable", "--now", NAME), services.did("restart", NAME)) == (1, 0)


@pytest.mark.parametrize(
    ("text", "settings", "restarts"),
    [("first\n", {}, 0), ("first\n", {"a": 1}, 1), ("second\n", {}, 1)],
)
def test_only_what_changes_restarts_it(
    services: Machine, program: pathlib.Path, text: str, settings: dict[str, int], restarts: int
):
    port = exporter.ensure(UNIT, program, {})
    program.write_text(text)
    assert exporter.ensure(UNIT, program, settings) == port
    assert (services.did("enable", "--now", NAME), services.did("restart", NAME)) == (1, restarts)
    services.active.clear()
    exporter.ensure(UNIT, program, settings)
    assert (services.did("enable", "--now", NAME), services.did("restart", NAME)) == (2, restarts)


def test_it_is_removed_whole(services: Machine, program: pathlib.Path, tmp_path: pathlib.Path):
    exporter.ensure(UNIT, program, {})
    for _ in range(2):
        exporter.ensure_none(UNIT)
    assert services.did("disable", "--now", NAME) == 1
    assert [path for path in (tmp_path / "units", tmp_path / "state") if any(path.iterdir())] == []


def test_units_of_one_machine_have_ports_of_their_own(services: Machine, program: pathlib.Path):
    first = exporter.ensure(UNIT, program, {})
    second = exporter.ensure("data/0", program, {})
    assert first != second
    assert min(first, second) >= 9701
    assert exporter.ensure(UNIT, program, {}) == first


def test_a_port_that_another_program_has_is_left_alone(services: Machine, program: pathlib.Path):
    taken = exporter.ensure(UNIT, program, {})
    exporter.ensure_none(UNIT)
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("127.0.0.1", taken))
        other.listen()
        assert exporter.ensure(UNIT, program, {}) > taken


def scraped(collector: exporter.Collector) -> list[str]:
    collected = registry.CollectorRegistry(auto_describe=False)
    collected.register(collector)
    lines = exposition.generate_latest(collected).decode().splitlines()
    return [line for line in lines if not line.startswith("#")]


def reading(name: str, value: float) -> Source:
    return Source(name, lambda: [gauge(f"{name}_value", "Text.", [({"at": "/a"}, value)])])


def failing(name: str, error: BaseException) -> Source:
    def read() -> collections.abc.Iterable[core.Metric]:
        yield gauge(f"{name}_half", "Text.", [({}, 1)])
        raise error

    return Source(name, read, {"volume": "shared"})


@pytest.mark.parametrize(
    "error", [OSError("no"), ValueError("odd"), CommandError("exited 1"), SystemExit(3)]
)
def test_a_source_that_fails_is_down_and_shows_nothing_else(error: BaseException):
    collector = exporter.Collector([failing("volume", error), reading("mount", 3)])
    assert scraped(collector) == [
        'slurm_ddp_volume_up{volume="shared"} 0.0',
        'slurm_ddp_mount_value{at="/a"} 3.0',
        "slurm_ddp_mount_up 1.0",
    ]


def test_a_source_that_hangs_is_down_and_holds_up_no_scrape_and_takes_one_thread():
    free = threading.Event()
    entered: list[int] = []

    def hang() -> list[core.Metric]:
        entered.append(1)
        free.wait(30)
        return [gauge("late", "Text.", [({}, 1)])]

    collector = exporter.Collector([Source("mount", hang), reading("disk", 1)], timeout_s=0.05)
    for _ in range(3):
        assert scraped(collector) == [
            "slurm_ddp_mount_up 0.0",
            'slurm_ddp_disk_value{at="/a"} 1.0',
            "slurm_ddp_disk_up 1.0",
        ]
    assert entered == [1]
    free.set()
    collector = exporter.Collector([Source("mount", hang)])
    assert scraped(collector) == ["slurm_ddp_late 1.0", "slurm_ddp_mount_up 1.0"]
