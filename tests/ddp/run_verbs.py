"""The verbs of the program asked without a front end: results as texts, remedies in plain words."""

import dataclasses
import os
import pwd
import typing

from harness import ActionFailedError, Trainer

from ddp.actions import verbs
from ddp.host import waits
from ddp.options import config, fields
from ddp.problem import Problem
from ddp.results.result import Result


class Program(Trainer):
    """The program on a host; actions are done in this process, without the charm's words."""

    record: dict[str, typing.Any]  # of the last result, as --json prints it

    def run(self, action: str, **params: typing.Any) -> dict[str, str]:
        options = {
            name: value
            for name, value in self.config.items()
            if name not in ("submit-user", "hf-token")
        }
        options["account"] = pwd.getpwuid(os.geteuid()).pw_name
        options["unit"] = "trainer/0"
        settings = config.settings(fields.parse(config.Config, options))
        settings = dataclasses.replace(settings, wait=waits.Wait(self.pause))
        verb, self.log = verbs.ACTIONS[action], []
        try:
            given = fields.parse(
                verb.options, {name.replace("_", "-"): value for name, value in params.items()}
            )
            found = typing.cast(object, verb.do_when_ready(settings, given, self.log.append))
        except Problem as e:
            self.results = e.results
            raise ActionFailedError(str(e)) from e
        self.results = (
            found.texts() if isinstance(found, Result) else typing.cast(dict[str, str], found)
        )
        self.record = found.record() if isinstance(found, Result) else {}
        return self.results


def of(trainer: Trainer) -> Program:
    """Return the same program without its front end."""
    return Program(trainer.workspace, trainer.root, trainer.config)
