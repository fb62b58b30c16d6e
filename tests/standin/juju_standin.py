#!/usr/bin/env python3
"""A juju client, and the few commands of a cluster's hosts, to run the integration lane's own code.

It answers the lane's commands and refuses everything else. Behind it is one JSON file, `state.json`
in the folder that JUJU_STANDIN names: a controller with its version, models, applications, units,
jobs. Commands change it; only `juju exec` runs something: its shell sees the folder `shared` as
/mnt/shared and the hosts' commands as this program.
"""

import collections.abc
import json
import os
import pathlib
import re
import subprocess
import sys
import typing
import uuid

ROOT = pathlib.Path(__file__).resolve().parents[2]
HOME = pathlib.Path(os.environ["JUJU_STANDIN"])
SHARED = "/mnt/shared"
SUBORDINATES = {
    "sackd": ("shared-filesystem-client", "trainer"),
    "slurmd": ("shared-filesystem-client", "slurm-gpu"),
}
State = dict[str, typing.Any]
STATE: State = {}  # of the controller, between two commands in state.json


class JujuError(Exception):
    """The juju client's text after `ERROR`."""


def show_controller(words: list[str]) -> str:
    _exactly(words, "--format", "json")
    return json.dumps(
        {"standin": {"details": {"agent-version": STATE["version"]}, "controller-machines": {}}}
    )


def add_model(words: list[str]) -> str:
    (name,) = (word for word in words if word != "--no-switch")
    STATE["models"][name] = {"applications": {}, "secrets": {}, "jobs": {}}
    return ""


def destroy_model(words: list[str]) -> str:
    names = [word for word in words if word not in {"--no-prompt", "--destroy-storage", "--force"}]
    del STATE["models"][names[0]]
    return ""


def show_model(words: list[str]) -> str:
    _exactly(words[-2:], "--format", "json")
    return json.dumps({"test": {"type": STATE["cloud"], "agent-version": STATE["version"]}})


def deploy(model: State, words: list[str]) -> str:
    """A bundle with overlays, as far as applications go; a charm that assumes another Juju is refused."""
    merged: dict[str, State] = {}
    for path in (pathlib.Path(word) for word in words if word != "--overlay"):
        for name, body in _yaml(path)["applications"].items():
            if body is None:
                del merged[name]
                continue
            before = merged.get(name, {})
            merged[name] = before | body
            merged[name]["options"] = before.get("options", {}) | body.get("options", {})
    facts = _yaml("tests/bundle/upstream.yaml")["charms"]
    for name, body in merged.items():
        if "juju < 4" in facts.get(body["charm"], {}).get("assumes", "") and not STATE[
            "version"
        ].startswith("3."):
            raise JujuError(
                f'Charm feature requirements cannot be met: charm requires feature "juju" ({name})'
            )
        if name in model["applications"]:
            _deploy_again(model["applications"][name], body)
            continue
        units = body.get("num_units", 0)
        model["applications"][name] = {
            "units": list(range(units)),
            "next": units,
            "options": body["options"],
        }
        model["lacks-database"] = model.get("lacks-database", False) or name == "mysql-proxy"
    return ""


def _deploy_again(application: State, body: State) -> None:
    """Set options; Juju 4, which gave the application arch=amd64, misses that in the bundle and looks for the charm."""
    is_local, has_units = body["charm"].startswith("."), bool(body.get("num_units"))
    if (
        is_local
        and has_units
        and STATE["version"].startswith("4.")
        and "arch=" not in body.get("constraints", "")
    ):
        raise JujuError(
            f"cannot deploy local charm at {body['charm'].removesuffix('.charm')}: file does not exist"
        )
    application["options"].update(body["options"])


def status(model: State, words: list[str]) -> str:
    _exactly(words, "--format", "json")
    applications: State = {}
    for name, application in model["applications"].items():
        waits = model.get("lacks-database") and name in {"mysql-proxy", "slurmdbd", "slurmrestd"}
        units = {}
        for number in application["units"]:
            units[f"{name}/{number}"] = _unit("waiting" if waits else "active") | {
                "subordinates": {
                    f"{sub}/{number}": _unit("active") for sub in SUBORDINATES.get(name, ())
                }
            }
        applications[name] = {"units": units, "charm-rev": application.get("revision", 0)}
    return json.dumps({"applications": applications})


def _unit(workload: str) -> State:
    return {
        "workload-status": {"current": workload, "message": ""},
        "juju-status": {"current": "idle"},
    }


def add_unit(model: State, words: list[str]) -> str:
    application = model["applications"][words[0]]
    application["units"].append(application["next"])
    application["next"] += 1
    return ""


def remove_unit(model: State, words: list[str]) -> str:
    """Remove a unit; its node stays in Slurm, as with upstream's 25.11."""
    _exactly(words[:1], "--no-prompt")
    name, _, number = words[1].partition("/")
    model["applications"][name]["units"].remove(int(number))
    return ""


def refresh(model: State, words: list[str]) -> str:
    name, flag, path = words
    if flag != "--path" or name not in model["applications"] or not path.endswith(".charm"):
        raise JujuError(f"cannot refresh {words}")
    application = model["applications"][name]
    application["revision"] = application.get("revision", 0) + 1
    return ""


def add_secret(model: State, words: list[str]) -> str:
    name, pair = words
    model["secrets"][name] = {
        "uri": f"secret:{uuid.uuid4().hex[:20]}",
        "content": pair,
        "granted": [],
    }
    return model["secrets"][name]["uri"] + "\n"


def grant_secret(model: State, words: list[str]) -> str:
    model["secrets"][words[0]]["granted"].append(words[1])
    return ""


def config(model: State, words: list[str]) -> str:
    """An option, or one back to its default; mysql-proxy has its database once the secret is granted and named."""
    options = model["applications"][words[0]]["options"]
    if words[1] == "--reset":
        del options[words[2]]
        return ""
    name, pair = words
    if "=" not in pair:
        return f"{options[pair]}\n"
    option, _, value = pair.partition("=")
    granted = [
        secret
        for secret in model["secrets"].values()
        if secret["uri"] == value and name in secret["granted"]
    ]
    if (name, option) != ("mysql-proxy", "db-uri") or not granted or not model.get("mariadb"):
        raise JujuError(
            f"{words}: no such option here, or no secret that {name} may read, or no database behind it"
        )
    model["lacks-database"] = False
    return ""


def run(model: State, words: list[str]) -> str:
    """An action of trainer's, with the parameters that its charmcraft.yaml declares."""
    _exactly(words[:3], "--format", "json", "--wait")
    unit, action, *pairs = words[4:]
    params = dict(pair.split("=", 1) for pair in pairs)
    declared = _yaml("charms/ddp-trainer/charmcraft.yaml")["actions"][action].get("params", {})
    for name, value in params.items():
        if name not in declared:
            raise JujuError(
                f'validation failed: (root) : additional property "{name}" is not allowed, given {params}'
            )
        if declared[name]["type"] == "integer" and int(value) < declared[name].get("minimum", 0):
            raise JujuError(
                f"validation failed: (root).{name} : must be greater than or equal to 1, given {value}"
            )
    results, failure = _act(model, action, params)
    answer = {
        "results": {**results, "return-code": 0},
        "status": "failed" if failure else "completed",
        "id": "7",
    }
    text = json.dumps({unit: answer | ({"message": failure} if failure else {})})
    if failure:
        print(text)
        raise JujuError('the following task failed:\n - id "7"')
    return text


def _act(model: State, action: str, params: dict[str, str]) -> tuple[dict[str, str], str]:
    if action != "submit-ddp":
        if action == "cancel-run":
            model["jobs"][params["run"].removeprefix("run-")] = "CANCELLED"
        return {"runs": json.dumps([f"run-{job}" for job in model["jobs"]])}, ""
    nodes, workload = int(params.get("nodes", 2)), params.get("workload", "gpt")
    have = model["applications"]["slurmd"]["units"]
    if nodes > len(have):
        return {}, f"nodes: the partition has {len(have)}"
    if workload not in {"gpt", "smoke"} and not workload.startswith(f"{SHARED}/"):
        return {}, "workload: gpt, smoke or a file below the workspace"
    job = str(len(model["jobs"]) + 1)
    waits = params.get("wait") == "true"
    model["jobs"][job] = "COMPLETED" if waits else "RUNNING"
    folder = HOME / "shared" / "runs" / f"run-{job}"
    folder.mkdir(parents=True)
    (folder / "checkpoint").touch()
    (folder / "log").write_text("[DONE] state=done\n")
    summary = {
        "state": "done",
        "ranks": [{"host": f"juju-2586ad-{n}"} for n in have[:nodes]],
        "first_loss": 5.0,
    }
    summary |= {"last_loss": 2.0, "checkpoint": f"{SHARED}/runs/run-{job}/checkpoint"}
    (folder / "summary.json").write_text(json.dumps(summary))
    place, state = f"{SHARED}/runs/run-{job}", model["jobs"][job]
    return {
        "job-id": job,
        "run": f"run-{job}",
        "state": state,
        "run-dir": place,
        "log": f"{place}/log",
    }, ""


def execute(model: State, words: list[str]) -> str:
    _exactly(words[:3], "--format", "json", "--unit")
    unit, _, command = words[3:]
    name, _, number = unit.partition("/")
    if int(number) not in model["applications"].get(name, {}).get("units", []):
        raise JujuError(f'unit "{unit}" not found')
    if re.search(
        r"apt-get install --yes mariadb-server|mariadb -e \"CREATE DATABASE slurm_acct_db; ",
        command,
    ):
        model["mariadb"] = True
        command = "true"
    boot = HOME / f"boot-{unit.replace('/', '-')}"
    if not boot.exists():
        boot.write_text(uuid.uuid4().hex)
    command = command.replace(SHARED, str(HOME / "shared")).replace(
        "/proc/sys/kernel/random/boot_id", str(boot)
    )
    (HOME / "shared").mkdir(exist_ok=True)
    _write()
    environment = os.environ | {
        "PATH": f"{HOME / 'bin'}:{os.environ['PATH']}",
        "JUJU_STANDIN_UNIT": unit,
    }
    done = subprocess.run(
        ["/bin/sh", "-c", command], check=False, capture_output=True, text=True, env=environment
    )
    results: State = {
        "return-code": done.returncode,
        "stdout": done.stdout.replace(str(HOME / "shared"), SHARED),
    }
    return json.dumps({unit: {"results": results, "status": "completed", "id": "8"}})


def host(command: str, words: list[str]) -> str:
    """Return the output of a command of a host, in a shell of `juju exec`."""
    unit = os.environ["JUJU_STANDIN_UNIT"]
    (model,) = STATE["models"].values()
    match command:
        case "sinfo":
            return "".join(
                f"slurmd-{number} idle\n" for number in model["applications"]["slurmd"]["units"]
            )
        case "squeue":
            found = model["jobs"].get(words[words.index("--job") + 1])
            return f"{found}\n" if found == "RUNNING" else ""
        case "sacct" if "--job" in words:
            return model["jobs"][words[words.index("--job") + 1]] + " by 1000\n"
        case "sacct":
            return "".join(f"{job}\n" for job in model["jobs"])
        case "hostname":
            return f"juju-2586ad-{unit.replace('/', '-')}\n"
        case "findmnt":
            return words[-1] + "\n"
        case "systemd-run":
            (HOME / f"boot-{unit.replace('/', '-')}").write_text(uuid.uuid4().hex)
            return ""
        case _:
            return ""  # chown


HOST_COMMANDS = ("sinfo", "squeue", "sacct", "hostname", "findmnt", "systemd-run", "chown")
OF_CONTROLLER = {
    one.__name__.replace("_", "-"): one
    for one in (show_controller, add_model, destroy_model, show_model)
}
OF_MODEL: dict[str, collections.abc.Callable[[State, list[str]], str]] = {
    one.__name__.replace("_", "-"): one
    for one in (
        deploy,
        status,
        add_unit,
        remove_unit,
        refresh,
        add_secret,
        grant_secret,
        config,
        run,
    )
} | {"exec": execute}


def _yaml(path: str | pathlib.Path) -> State:
    import yaml  # the client is started hundreds of times, and few of its commands read YAML

    return yaml.load((ROOT / path).read_text(), getattr(yaml, "CSafeLoader", yaml.SafeLoader))


def _exactly(words: list[str], *wanted: str) -> None:
    if words != list(wanted):
        raise JujuError(f"unrecognized args: {words}")


def _write() -> None:
    (HOME / "state.json").write_text(json.dumps(STATE))


def main(program: str, words: list[str]) -> int:
    STATE.update(json.loads((HOME / "state.json").read_text()))
    try:
        if program != "juju":
            print(host(program, words), end="")
            return 0
        with (HOME / "calls").open("a") as calls:
            calls.write(json.dumps(words) + "\n")
        command, *rest = words
        name = ""
        if rest[:1] == ["--model"]:
            name, rest = rest[1].rpartition(":")[2], rest[2:]
        if command in OF_CONTROLLER:
            if command == "destroy-model":
                rest = [*rest, name] if name else rest
            print(OF_CONTROLLER[command](rest), end="")
        else:
            print(OF_MODEL[command](STATE["models"][name], rest), end="")
    except (JujuError, KeyError) as e:
        print(f"ERROR {e}", file=sys.stderr)
        return 1
    finally:
        if program == "juju":
            _write()
    return 0


if __name__ == "__main__":
    sys.exit(main(pathlib.Path(sys.argv[0]).name, sys.argv[1:]))
