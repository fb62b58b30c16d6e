"""The charm's front end, which the charm starts as the submit user: `ddp serve`.

One request is a line of JSON on standard input, {"do": ..., "config": {...}, "unit": ..., ...}; the answer is lines of
JSON on standard output: any number of {"log": text}, then {"results": {...}}, with "error" and one line if it failed.
When standard input ends, the charm has ended, and this process exits; the jobs go on.
"""

import dataclasses
import functools
import json
import os
import pathlib
import re
import shlex
import sys
import threading
import typing

from ddp import backports, config, problem, readiness, verbs
from ddp.base import Log, ParameterError, Settings, TrainerError, texts_of
from ddp.options import declared, fields
from ddp.run import telemetry
from ddp.slurm import jobs
from ddp.workspace import files, folders, operations, tokens
from slurm_ddp import run
from slurm_ddp.slurm import advice

Json = dict[str, typing.Any]
_PARTIAL = 75  # sysexits.h, EX_TEMPFAIL
# Texts that YAML 1.1 reads as they are, and what it reads as something else
_TEXT = re.compile(
    r"(?!.*(:\s|\s#))(-{0,2}[A-Za-z_/]([\w .,/+@=%^&|:#-]*[\w/])?|[1-9][0-9]{0,17}|([0-9]+-)?[0-9]+(:[0-9]+)+)",
    re.ASCII,
)
_YAML_WORDS = ("y", "n", "yes", "no", "on", "off", "true", "false", "null")
_STEPS: dict[str, str] = backports.read_toml(pathlib.Path(__file__).with_suffix(".toml"))
_QUIET_S = 5.0  # an action that takes longer gets a note on how to end it


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
    render = functools.partial(render_remedy, request["unit"])
    try:
        given = fields.parse(config.Config, request["config"])
        attached = request.get("wheelhouse")
        settings = dataclasses.replace(
            config.settings(given),
            unit=request["unit"],
            token=request.get("token", ""),
            wheelhouse=pathlib.Path(attached) if attached else None,
            takes_any_script=False,
            render=render,
        )
        return {"results": _do(settings, request, log)}
    except TrainerError as e:
        return {"error": e.text(render), "results": e.results}
    except (files.RefusedError, run.CommandError, jobs.SlurmError) as e:
        return {"error": str(e), "results": {}}


def _do(settings: Settings, request: Json, log: Log) -> Json:
    wanted = request["do"]
    if wanted == "make-folders":
        place = str(settings.workspace)
        folders.call(settings, operations.make_users, workspace=place)
        trusted = folders.trusted(settings)
        made = folders.call(settings, operations.make_folders, workspace=place, names=folders.FOLDERS, trusted=trusted)
        if not made["denied"]:
            tokens.sync(settings)
        return made
    if wanted == "sync-tokens":
        tokens.sync(settings)
        return {}
    if wanted == "check":
        return dataclasses.asdict(readiness.check(settings))
    if wanted == "metrics":
        return telemetry.collect(settings)
    verb = verbs.ACTIONS.get(wanted)
    if verb is None:
        raise ParameterError("do", f"unknown request {wanted!r}")
    params = fields.parse(verb.options, request["params"])
    stop = f"to stop waiting, without cancelling a job: juju cancel-task {request.get('task', '')}"
    note = threading.Timer(_QUIET_S, log, [f"{settings.unit} runs no other action while this one waits; {stop}"])
    note.daemon = True
    note.start()
    try:
        return texts_of(verb.do_when_ready(settings, params, log) or {})
    finally:
        note.cancel()


def render_remedy(unit: str, remedy: problem.Remedy) -> str:
    """Render a remedy as an operator of the bundle types it, also once the unit has another number."""
    unit = f"{unit.partition('/')[0]}/leader"
    if isinstance(remedy, problem.Step):
        return _render_step(unit, remedy)
    verb = verbs.ALL[remedy.verb]
    if not verb.action:
        return problem.plain(remedy)
    given = dict(remedy.given)
    if remedy.arguments:
        named = next(option.name for option in declared.options(verb.options) if option.text.argument)
        given[named] = ",".join(remedy.arguments)
    kinds = {option.name: option.kind for option in declared.options(verb.options)}
    words = (f"{name}={_in_yaml(value) if kinds[name] == 'string' else value}" for name, value in given.items())
    return " ".join(["juju run", unit, verb.action, *map(shlex.quote, words)])


def _in_yaml(value: object) -> str:
    """Quote a text that YAML may take for something else, as `juju run` does."""
    text = str(value)
    is_text = _TEXT.fullmatch(text) is not None and text.lower() not in _YAML_WORDS
    return text if is_text else json.dumps(text, ensure_ascii=False)


def _render_step(unit: str, step: problem.Step) -> str:
    if line := step.values.get("line"):
        name, _, value = line.partition("=")
        if step.name == "slurm-conf":
            return advice.slurm_conf({name: value})
        if step.name == "partition-conf":
            return advice.partition_config(step.values["partition"], name, value)
    known = _STEPS.get(step.name)
    app = unit.partition("/")[0]
    return step.text if known is None else known.format_map({"unit": unit, "app": app, **step.values})
