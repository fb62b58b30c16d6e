# pyright: basic, reportMissingImports=false
"""Do a hook's work in the guest, without Juju. One JSON object a line in, one out."""

import json
import pathlib
import sys
import traceback
import typing

sys.path[:0] = [
    "/opt/charm/src",
    "/opt/charm/lib",
    *map(str, pathlib.Path("/opt/sandbox/venv/lib").glob("python3*/site-packages")),
]

import mount_plan  # noqa: E402
from mount import judge, mounter, plans  # noqa: E402
from slurm_ddp import files, mounts, systemd  # noqa: E402
from slurm_ddp.charm import StatusError  # noqa: E402


def hook(asked: dict[str, typing.Any]) -> dict[str, typing.Any]:
    """Run a request; return the status, or the plan."""
    app = asked.get("app", "client")
    if asked["do"] == "remove":
        mounter.remove(app, unit=f"{app}/0")
        return {}
    config = mount_plan.Config(**asked.get("config", {}))
    try:
        with judge.explained(app):
            plan = plans.draw(
                plans.spec(f"{app}/0", config, []),
                "proxy",
                asked["uri"],
                read_secret=lambda identifier: asked.get("secret", {}),
                fetch_program=lambda: None,
            )
            if asked["do"] == "draw":
                return written(plan)
            verdict = judge.judge(plan, mounter.ensure(plan))
    except StatusError as e:
        verdict = e.status
    return {"level": verdict.level, "text": verdict.text}


def written(plan: mount_plan.Plan) -> dict[str, typing.Any]:
    """Write the plan's files and unit without starting it; return the unit's facts."""
    for path, text in plan.files.items():
        files.ensure_file(path, text, mode=0o600)
    systemd.ensure_unit(plan.unit, plan.unit_text)
    return {
        "unit": plan.unit,
        "source": plan.source,
        "aliases": plan.aliases,
        "secrets": plan.secrets,
    }


for line in sys.stdin:
    try:
        answer = hook(json.loads(line))
    except (OSError, ValueError, LookupError, TypeError, mounts.MountError):  # the test must see it
        answer = {"level": "error", "text": traceback.format_exc()}
    print(json.dumps(answer), flush=True)
