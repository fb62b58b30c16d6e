"""env path: an environment for a user's own job script, which sbatch takes without ddp."""

import contextlib
import hashlib
import pathlib
import shlex
import shutil
import tempfile

from ddp.environment import store
from ddp.node import spec
from ddp.options import models
from ddp.results.progress import Log
from ddp.results.result import Result
from ddp.settings import Settings
from ddp.submit import job_program, scripts
from ddp.workspace import folders

_PROLOG = "#!/bin/sh\nexec /usr/bin/python3 -I -S -B {program}\n"
# POSIX: it may be sourced by any shell of Bourne's family
_ACTIVATE = """# Source this in a job's script: it unpacks the environment here, and srun does on the other nodes.
_ddp_lines=$(/usr/bin/python3 -I -S -B {program}) || {{
    printf '%s\\n' "${{_ddp_lines#print }}" >&2
    unset _ddp_lines
    return 1
}}
while IFS= read -r _ddp_line; do
    case $_ddp_line in
    "export "*) export "${{_ddp_line#export }}" ;;
    *) printf '%s\\n' "$_ddp_line" >&2 ;;
    esac
done <<END
$_ddp_lines
END
unset _ddp_lines _ddp_line
export SLURM_TASK_PROLOG={prolog}
"""


def env_path(settings: Settings, params: models.EnvironmentPath, log: Log) -> Result:
    """Store a folder with bin/activate for an environment; return its path. Raises Problem."""
    workspace = settings.workspace
    workspace.ensure_folders()
    environment = _environment(settings, params.name, log)
    about = spec.dump(scripts.environment_of(settings, environment)).encode()
    archive = job_program.archive()
    digest = hashlib.sha256(archive + about).hexdigest()
    folder = workspace.environments / f"activate-{environment.hash}-{digest[:8]}"
    prolog = folder / "bin" / "task-prolog"
    specification = str(folder / "program" / "environment.json")
    words = [spec.program_of(specification), "activate", specification]
    quoted = {"program": shlex.join(words), "prolog": shlex.quote(str(prolog))}
    files = {
        f"program/{spec.PROGRAM}": archive,
        "program/environment.json": about,
        "bin/task-prolog": _PROLOG.format(**quoted).encode(),
        "bin/activate": _ACTIVATE.format(**quoted).encode(),
    }
    workspace.do(_store, folder=folder, files=files)
    path = str(folder)
    return Result({"path": path}, {"path": path}, text=path)


def _environment(settings: Settings, name: str | None, log: Log) -> folders.Manifest:
    environments = store.Store(settings)
    if name is None:
        return environments.ensure(log)
    return environments.named(settings.workspace.look(), name)


def _store(folder: pathlib.Path, files: dict[str, bytes]) -> None:
    """Write the files of a folder, which appears whole."""
    if folder.is_dir():
        return
    partial = pathlib.Path(tempfile.mkdtemp(prefix=".activate-", dir=folder.parent))
    try:
        for name, content in files.items():
            path = partial / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        (partial / "bin" / "task-prolog").chmod(0o755)
        partial.chmod(0o755)
        with contextlib.suppress(OSError):  # another process was faster
            partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
