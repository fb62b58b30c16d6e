"""The charm's front end, which the charm starts as the submit user: `ddp serve`.

The request is a line of JSON on standard input, {"do": ..., "config": {...}, "unit": ..., ...}. The
answer is lines of JSON on standard output: any number of {"log": text}, then {"results": {...}},
with "error" if it failed. When standard input ends, the charm has ended: this process exits, and
the jobs go on.
"""

import dataclasses
import functools
import json
import os
import pathlib
import pwd
import re
import shlex
import sys
import threading
import typing

from ddp import problem
from ddp.actions import prerequisites, verbs
from ddp.host import files, waits
from ddp.options import config, declared, fields
from ddp.problem import ParameterError, Problem
from ddp.results.progress import Log
from ddp.results.result import texts_of
from ddp.run import telemetry
from ddp.settings import Settings
from ddp.slurm import jobs
from ddp.submit import tokens
from slurm_ddp import backports, commands
from slurm_ddp.slurm import advice

Json = dict[str, typing.Any]
_PARTIAL = 75  # sysexits.h, EX_TEMPFAIL
# Texts that YAML 1.1 reads as they are, and words that it reads as something else
_TEXT = re.compile(
    r"(?!.*(:\s|\s#))(-{0,2}[A-Za-z_/]([\w .,/+@=%^&|:#-]*[\w/])?|[1-9][0-9]{0,17}|([0-9]+-)?[0-9]+(:[0-9]+)+)",
    re.ASCII,
)
_YAML_WORDS = ("y", "n", "yes", "no", "on", "off", "true", "false", "null")
_JUJUS_USER = "ubuntu"  # whose shell `juju ssh` opens
_STEPS: dict[str, str] = backports.read_toml(pathlib.Path(__file__).with_suffix(".toml"))
_QUIET_S = 5.0  # an action that takes longer gets a note on how to end it
# How long an action waits for jobs at most while the machine's units wait for it
_HELD_LIMIT_S = 900


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


def answer(request: Json, log: Log, wait: waits.Wait | None = None) -> Json:
    """Do a request and return the last line of the answer."""
    render = functools.partial(render_remedy, request["unit"])
    try:
        given = fields.parse(config.Config, {**request["config"], "unit": request["unit"]})
        attached = request.get("wheelhouse")
        settings = dataclasses.replace(
            config.settings(given),
            token=request.get("token", ""),
            wheelhouse=pathlib.Path(attached) if attached else None,
            takes_any_script=False,
            wait=wait or waits.Wait(),
            render=render,
        )
        return {"results": _do(settings, request, log)}
    except Problem as e:
        return {"error": e.text(render), "results": e.results}
    except (files.RefusedError, commands.CommandError, jobs.SlurmError) as e:
        return {"error": str(e), "results": {}}


def _do(settings: Settings, request: Json, log: Log) -> Json:
    wanted = request["do"]
    workspace = settings.workspace
    if wanted == "make-folders":
        made = workspace.ensure_shared_folders()
        if not made.denied:
            tokens.sync(settings.workspace, settings.token)
        return dataclasses.asdict(made)
    if wanted == "sync-tokens":
        tokens.sync(settings.workspace, settings.token)
        return {}
    if wanted == "check":
        return dataclasses.asdict(prerequisites.check(settings))
    if wanted == "metrics":
        return telemetry.collect(workspace)
    verb = verbs.ACTIONS.get(wanted)
    if verb is None:
        raise ParameterError("do", f"unknown request {wanted!r}")
    return _act(verb, settings, request, log)


def _act(verb: verbs.Verb, settings: Settings, request: Json, log: Log) -> Json:
    """Do an action; log how to end it if it takes long. Raises Problem."""
    unit = settings.workspace.unit
    params = fields.parse(verb.options, request["params"])
    if request.get("holds-machine"):
        can_be_ended = not {"wait_limit", "follow"}.isdisjoint(verb.options.model_fields)
        if can_be_ended:
            settings.wait.begin(verb.action)
        params = _bounded(params)
        text = _held(unit, can_be_ended=can_be_ended)
    else:
        task = request.get("task", "")
        stop = f"to stop waiting, without cancelling a job: juju cancel-task {task}"
        text = f"{unit} runs no other action while this one waits; {stop}"

    note = threading.Timer(_quiet_s(request, params), log, [text])
    note.daemon = True
    note.start()
    try:
        return texts_of(verb.do_when_ready(settings, params, log) or {})
    finally:
        note.cancel()


def _bounded(params: fields.Parsed) -> fields.Parsed:
    """Limit the wait of an action that holds its machine, unless the operator chose a limit."""
    if getattr(params, "wait_limit", 0) is not None:
        return params
    return params.model_copy(update={"wait_limit": _HELD_LIMIT_S})


def _quiet_s(request: Json, params: fields.Parsed) -> float:
    """Return the seconds until a log line says how to end an action; 0 if it holds its machine."""
    waits = getattr(params, "wait", False) or getattr(params, "follow", False)
    return 0.0 if request.get("holds-machine") and waits else _QUIET_S


def _held(unit: str, *, can_be_ended: bool) -> str:
    """Say that others wait for this action, and how to look, cancel and end it without Juju."""
    login = _login(unit)
    text = f"hooks and actions of all units on the machine of {unit} wait while this action runs; "
    text += f"to look: {login} ddp list; to cancel a job: {login} ddp cancel RUN"
    if can_be_ended:
        text += f"; to end this action, not its job: {login} ddp stop-waiting"
    return text


def _login(unit: str) -> str:
    """Return the words before a command that runs as this account on the login host at once."""
    user = pwd.getpwuid(os.geteuid()).pw_name
    return f"juju ssh {unit}" if user == _JUJUS_USER else f"juju ssh {unit} sudo -u {user}"


def render_remedy(unit: str, remedy: problem.Remedy) -> str:
    """Render a remedy as an operator types it; `leader` holds also when the unit was replaced."""
    unit = f"{unit.partition('/')[0]}/leader"
    if isinstance(remedy, problem.Step):
        return _render_step(unit, remedy)
    verb = verbs.ALL[remedy.verb]
    if not verb.action:
        return problem.plain(remedy)
    given = dict(remedy.given)
    options = declared.options(verb.options)
    if remedy.arguments:
        argument = next(option.name for option in options if option.text.argument)
        given[argument] = ",".join(remedy.arguments)

    kinds = {option.name: option.kind for option in options}
    words = ["juju run", unit, verb.action]
    for name, value in given.items():
        shown = _in_yaml(value) if kinds[name] == "string" else value
        words.append(shlex.quote(f"{name}={shown}"))
    return " ".join(words)


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
    if known is None:
        return step.text
    return known.format_map({"unit": unit, "app": app, "login": _login(unit), **step.values})
