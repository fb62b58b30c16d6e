"""A double of slurm_ddp.exporter's service: the settings of each unit's exporter here."""

import collections.abc
import dataclasses
import json
import pathlib
import typing

import pytest
from ops import testing

from slurm_ddp import exporter
from slurm_ddp.interfaces import cos_agent

PORT = 9701


@dataclasses.dataclass
class FakeExporter:
    """The exporters of this machine, all of one program."""

    program: pathlib.Path
    serving: dict[str, dict[str, typing.Any]] = dataclasses.field(
        default_factory=dict[str, dict[str, typing.Any]]
    )
    error: Exception | None = None  # what starting one raises

    def ensure(
        self, unit: str, program: pathlib.Path, settings: collections.abc.Mapping[str, object]
    ) -> int:
        assert program == self.program
        if self.error is not None:
            raise self.error
        self.serving[unit] = json.loads(json.dumps(settings))  # as the service reads it
        return PORT

    def ensure_none(self, unit: str) -> None:
        self.serving.pop(unit, None)


def install(monkeypatch: pytest.MonkeyPatch, charm_root: pathlib.Path) -> FakeExporter:
    """Put the double in the exporter's place, for the charm in this folder."""
    double = FakeExporter(charm_root / "src" / "metrics.py")
    monkeypatch.setattr(exporter, "ensure", double.ensure)
    monkeypatch.setattr(exporter, "ensure_none", double.ensure_none)
    return double


def collector() -> testing.SubordinateRelation:
    """Make the relation with a collector on the unit's machine."""
    return testing.SubordinateRelation(
        cos_agent.ENDPOINT, id=900, remote_app_name="opentelemetry-collector"
    )
