"""The program called as by the charm: requests in, results out, and the files that jobs leave."""

import collections.abc
import dataclasses
import json
import os
import pathlib
import pwd
import typing

import pytest
import yaml
from cluster import no_pause

from ddp import service
from ddp.host import waits

Json = dict[str, typing.Any]
ROOT = pathlib.Path(__file__).parents[2]
META = yaml.safe_load((ROOT / "charms" / "ddp-trainer" / "charmcraft.yaml").read_text())


@dataclasses.dataclass
class Trainer:
    """The program on a host, asked as the charm asks it."""

    workspace: pathlib.Path
    root: pathlib.Path
    config: dict[str, typing.Any]
    results: dict[str, str] = dataclasses.field(default_factory=dict[str, str])
    log: list[str] = dataclasses.field(default_factory=list[str])
    holds_machine: bool = False  # by the action, as on Juju 4
    pause: collections.abc.Callable[[float], None] = no_pause  # between two looks at a job

    def run(self, action: str, **params: typing.Any) -> dict[str, str]:
        """Return an action's results; a failed one raises ActionFailedError."""
        given = {name.replace("_", "-"): value for name, value in params.items()}
        options = {
            name: value
            for name, value in self.config.items()
            if name not in ("submit-user", "hf-token")
        }
        options["account"] = pwd.getpwuid(os.geteuid()).pw_name
        wheelhouse = self.root / "wheelhouse"
        attached = str(wheelhouse) if wheelhouse.is_file() and wheelhouse.stat().st_size else ""
        request = {
            "do": action,
            "params": given,
            "config": options,
            "unit": "trainer/0",
            "task": "7",
            "holds-machine": self.holds_machine,
            "wheelhouse": attached,
        }
        self.log = []
        asked = json.loads(json.dumps(request))
        answer = service.answer(asked, self.log.append, waits.Wait(self.pause))
        reply = json.loads(json.dumps(answer))
        self.results = typing.cast(dict[str, str], reply["results"])
        if error := reply.get("error", ""):
            raise ActionFailedError(error)
        return self.results

    def fails(self, action: str, **params: typing.Any) -> str:
        """Return the one-line message of an action that fails."""
        with pytest.raises(ActionFailedError) as caught:
            self.run(action, **params)
        assert caught.value.message.isprintable()
        return caught.value.message

    def files(self) -> dict[str, int]:
        """List the workspace's files, with the time of each change."""
        return {
            str(path.relative_to(self.workspace)): path.lstat().st_mtime_ns
            for path in self.workspace.rglob("*")
        }


class ActionFailedError(Exception):
    """An action failed; `message` is its one line."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message
