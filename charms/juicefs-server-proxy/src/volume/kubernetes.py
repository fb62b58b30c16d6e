"""Describe the volume for Kubernetes, so that its CSI driver (csi.juicefs.com) can mount it.

The credentials go into the mount pods' environment (`envs`), not into the metadata engine's URL,
which those pods have on their command line. Sources: the driver's manual, "Create and use PV", and
the Kubernetes API reference (v1, storage/v1).
"""

import json
import pathlib
import re

from slurm_ddp import files
from slurm_ddp.charm import Action, Log, Parameters, Results
from volume.maintenance import private
from volume.target import Unit, render

_DRIVER = "csi.juicefs.com"
_TEMPLATES = pathlib.Path(__file__).with_name("templates")
_FILES_DIR = pathlib.Path("/etc/juicefs-certificates")  # in the mount pods


class _Parameters(Parameters, frozen=True):
    namespace: str = "default"
    name: str = ""
    size: str = "1Ti"


def _export(unit: Unit, wanted: _Parameters, _log: Log) -> Results:
    """Write Secrets, StorageClass, PersistentVolume and -Claim to a file; show all but secrets.

    The driver's mount pods run the same version of juicefs. JuiceFS takes no limit from `size`.
    """
    target, setting = unit.verify()
    name, namespace = wanted.name or target.volume.name, wanted.namespace
    for parameter, value in (("namespace", namespace), ("name", name)):
        if not re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,50}[a-z0-9])?", value):
            raise ValueError(
                f"{parameter}: letters a-z, digits and hyphens, 52 at most, with no hyphen at either end"
            )
    if not re.fullmatch(r"[1-9][0-9]{0,8}(Ki|Mi|Gi|Ti|Pi)", wanted.size):
        raise ValueError("size: a number and one of Ki, Mi, Gi, Ti and Pi, like 100Gi")
    volume = target.volume
    access = volume.access(target.credentials, directory=_FILES_DIR)
    data = {
        "name": volume.name,
        "metaurl": access.url,
        "storage": volume.storage,
        "bucket": volume.bucket,
    }
    if access.environment:
        data["envs"] = json.dumps(access.environment, sort_keys=True)
    secrets = {name: data}
    if access.files:
        data["configs"] = json.dumps({f"{name}-files": str(_FILES_DIR)})
        secrets[f"{name}-files"] = {path.name: text for path, text in access.files.items()}
    labels = {"app.kubernetes.io/managed-by": "juicefs-server-proxy", "juicefs/volume": volume.name}
    common = {"name": name, "namespace": namespace, "labels": labels}
    hidden = render(_TEMPLATES, "kubernetes-secrets.yaml.j2", **common, secrets=secrets)
    handle = f"{volume.name}-{setting.uuid}"
    shown = render(
        _TEMPLATES, "kubernetes.yaml.j2", **common, driver=_DRIVER, handle=handle, size=wanted.size
    )
    path = private(target.directory / "kubernetes") / f"{name}.yaml"
    files.ensure_file(path, hidden + shown, mode=0o600)
    apply = f"juju ssh {unit.name} sudo cat {path} | kubectl apply -f -"
    return {"file": str(path), "apply": apply, "without-secrets": shown}


ACTIONS: dict[str, Action[Unit]] = {"export-kubernetes": Action(_Parameters, _export)}
