"""The files of a submission, and shell scripts that stand for ranks."""

import pathlib
import signal
import sys
import time
import typing

from batch_host import Node
from ddp.options import fields, models
from ddp.project import copies
from ddp.settings import Settings
from ddp.submit import resources, scripts
from ddp.workspace import folders

MANIFEST = folders.Manifest(
    key="0" * 16,
    hash="ab" * 8,
    sha256="ab" * 32,
    size_bytes=10,
    unpacked_bytes=20,
    python=f"3.{sys.version_info[1]}",
    torch="2.13.0+cpu",
    build="cpu",
    created="2026-11-20T00:00:00Z",
)
REQUEST = resources.Request("main", 2, 1, 4, 8000, "02:00:00", 180)


def texts(
    settings: Settings,
    request: resources.Request = REQUEST,
    *,
    outcome: bool = True,
    start: copies.Start | None = None,
    secrets: tuple[str, ...] = (),
    stored: folders.Manifest = MANIFEST,
    **given: typing.Any,
) -> dict[str, str]:
    params = fields.parse(models.SubmitDdp, {k.replace("_", "-"): v for k, v in given.items()})
    command = ("--module", "ddptrain", "smoke", "--lr", "3e-3")
    program = scripts.Program(command, leaves_outcome=outcome, start=start)
    job = scripts.TrainingJob(settings, request, params, "first", program, secrets=secrets)
    folder = str(settings.workspace.environments)
    return job.texts(stored.model_copy(update={"folder": folder}))


ENDS = (
    'echo "{\\"outcome\\": \\"%s\\", \\"step\\": 5}" > "$RUN_DIR/control/$RUN_ATTEMPT_ID.outcome"'
)
WAITS = 'touch "$NOTES/started"; for i in $(seq 1800); do [ -e "$STOP_FILE" ] && break; /bin/sleep 0.05; done; '


def stop(
    node: Node, files: dict[str, str], number: signal.Signals, **more: typing.Any
) -> tuple[int, str]:
    process = node.start(files, **more)
    wait_for(node.notes / "started")
    process.send_signal(number)
    return node.finish(process)


def wait_for(path: pathlib.Path) -> None:
    for _ in range(1800):
        if path.exists():
            return
        time.sleep(0.05)
    raise AssertionError(f"{path} never appeared")
