"""The charm's interface to the program, which it starts as the submit user: `ddp serve`.

One request is a line of JSON on standard input, {"do": ..., "config": {...}, "unit": ..., ...}; the answer is lines of
JSON on standard output: any number of {"log": text}, then {"results": {...}}, with "error" and a line where it failed.
When standard input ends, the charm has ended, and this process exits; the jobs go on.
"""

import dataclasses
import json
import os
import pathlib
import sys
import threading
import typing

from ddp import config, readiness, verbs
from ddp.base import Log, ParameterError, Settings, TrainerError
from ddp.options import fields
from ddp.run import telemetry
from ddp.slurm import jobs
from ddp.view.result import Result
from ddp.workspace import files, folders, operations, tokens
from slurm_ddp import run

Json = dict[str, typing.Any]
_PARTIAL = 75  # sysexits.h, EX_TEMPFAIL


def main() -> typing.NoReturn:
    """Answer the request on standard input."""
    os.umask(0o022)
    request = json.loads(sys.stdin.readline())
    threading.Thread(target=_exit_with_the_charm, daemon=True).start()

    def reply(line: Json) -> None:
        print(json.dumps(line), flush=True)

    reply(answer(request, lambda text: reply({"log": text})))
    os._exit(0)  # a thread may hang on a filesystem


def _exit_with_the_charm() -> None:
    sys.stdin.read()
    os._exit(_PARTIAL)


def answer(request: Json, log: Log) -> Json:
    """Do a request and return the last line of the answer."""
    try:
        given = fields.parse(config.Config, request["config"])
        attached = request.get("wheelhouse")
        settings = dataclasses.replace(
            config.settings(given),
            unit=request["unit"],
            token=request.get("token", ""),
            task=request.get("task", ""),
            wheelhouse=pathlib.Path(attached) if attached else None,
            is_action=True,
        )
        results = _do(settings, request, log)
        return {"results": results.texts() if isinstance(results, Result) else results}
    except TrainerError as e:
        return {"error": str(e), "results": e.results}
    except (files.RefusedError, run.CommandError, jobs.SlurmError) as e:
        return {"error": str(e), "results": {}}


def _do(settings: Settings, request: Json, log: Log) -> Json | Result:
    wanted = request["do"]
    if wanted == "make-folders":
        place = str(settings.workspace)
        folders.call(settings, operations.make_users, workspace=place)
        trusted = folders.trusted(settings)
        return folders.call(settings, operations.make_folders, workspace=place, names=folders.FOLDERS, trusted=trusted)
    if wanted == "sync-tokens":
        tokens.sync(settings)
        return {}
    if wanted == "withdraw":
        tokens.withdraw(settings)
        return {}
    if wanted == "check":
        return dataclasses.asdict(readiness.check(settings))
    if wanted == "metrics":
        return telemetry.collect(settings, request.get("seen"))
    verb = verbs.ACTIONS.get(wanted)
    if verb is None:
        raise ParameterError("do", f"there is no {wanted!r}")
    params = fields.parse(verb.params, request["params"])
    return verb.do_when_ready(settings, params, log)
