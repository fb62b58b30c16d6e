"""The volume for Kubernetes: what its CSI driver (csi.juicefs.com) takes to mount the same volume there.

The credentials go into the mount pods' environment (`envs`), not into the metadata engine's URL, which those pods have
on their command line. Sources: the driver's manual, "Create and use PV", and the Kubernetes API reference (v1,
storage/v1).
"""

import dataclasses
import json
import pathlib
import re

import yaml

from slurm_ddp import files, juicefs_access
from slurm_ddp.interfaces import filesystem_info as fs
from volume.spec import Volume

_DRIVER = "csi.juicefs.com"
_FILES_DIR = pathlib.Path("/etc/juicefs-certificates")  # in the mount pods


@dataclasses.dataclass(frozen=True)
class Export:
    """The objects, as one YAML document each. The secrets are apart: nobody but root may read them."""

    secrets: str = dataclasses.field(repr=False)
    others: str = ""


def manifests(
    volume: Volume,
    uuid: str,
    secret: fs.JuicefsSecret,
    version: juicefs_access.Version,
    *,
    namespace: str,
    name: str,
    size: str,
) -> Export:
    """Return the Secret, StorageClass, PersistentVolume and PersistentVolumeClaim of a volume.

    Args:
        volume: what is mounted.
        uuid: of it.
        secret: the credentials.
        version: of the juicefs that the driver's mount pods run.
        namespace: of the claim and the secrets.
        name: of all objects.
        size: what volume and claim state to hold; JuiceFS takes no limit from it.

    Raises:
        ValueError: a name or the size is none that Kubernetes takes; the message names the parameter.
    """
    for parameter, value in (("namespace", namespace), ("name", name)):
        if not re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,50}[a-z0-9])?", value):
            raise ValueError(f"{parameter}: letters a-z, digits and hyphens, 52 at most, with no hyphen at either end")
    if not re.fullmatch(r"[1-9][0-9]{0,8}(Ki|Mi|Gi|Ti|Pi)", size):
        raise ValueError("size: a number and one of Ki, Mi, Gi, Ti and Pi, like 100Gi")
    access = juicefs_access.access(
        volume.engine,
        secret,
        version,
        directory=_FILES_DIR,
        store=volume.storage,
        keyless=volume.keyless,
        region=volume.region,
    )
    labels = {"app.kubernetes.io/managed-by": "juicefs-server-proxy", "juicefs/volume": volume.name}
    data = {"name": volume.name, "metaurl": access.url, "storage": volume.storage, "bucket": volume.bucket}
    if access.environment:
        data["envs"] = json.dumps(access.environment, sort_keys=True)
    secrets: list[dict[str, object]] = []
    if access.files:
        certificates = f"{name}-files"
        data["configs"] = json.dumps({certificates: str(_FILES_DIR)})
        content = {path.name: text for path, text in access.files.items()}
        secrets.append(_secret(certificates, namespace, labels, content))
    secrets.insert(0, _secret(name, namespace, labels, data))
    reference = {"name": name, "namespace": namespace}
    parameters = {
        f"csi.storage.k8s.io/{use}-secret-{part}": value
        for use in ("provisioner", "node-publish", "controller-expand")
        for part, value in reference.items()
    }
    others: list[dict[str, object]] = [
        {
            "apiVersion": "storage.k8s.io/v1",
            "kind": "StorageClass",
            "metadata": {"name": name, "labels": labels},
            "provisioner": _DRIVER,
            "parameters": parameters,
            "reclaimPolicy": "Retain",
            "allowVolumeExpansion": True,
            "volumeBindingMode": "Immediate",
        },
        {
            "apiVersion": "v1",
            "kind": "PersistentVolume",
            "metadata": {"name": name, "labels": labels},
            "spec": {
                "capacity": {"storage": size},
                "volumeMode": "Filesystem",
                "accessModes": ["ReadWriteMany"],
                "persistentVolumeReclaimPolicy": "Retain",
                "storageClassName": "",
                "claimRef": {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "name": name, "namespace": namespace},
                "csi": {
                    "driver": _DRIVER,
                    "volumeHandle": f"{volume.name}-{uuid}",
                    "fsType": "juicefs",
                    "nodePublishSecretRef": reference,
                },
            },
        },
        {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": {"name": name, "namespace": namespace, "labels": labels},
            "spec": {
                "accessModes": ["ReadWriteMany"],
                "volumeMode": "Filesystem",
                "storageClassName": "",
                "volumeName": name,
                "resources": {"requests": {"storage": size}},
            },
        },
    ]
    return Export(_dump(secrets), _dump(others))


def write(export: Export, folder: pathlib.Path, name: str) -> pathlib.Path:
    """Write everything into one file for root alone; return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o700)
    path = folder / f"{name}.yaml"
    files.ensure_file(path, f"{export.secrets}---\n{export.others}", mode=0o600)
    return path


def _secret(name: str, namespace: str, labels: dict[str, str], content: dict[str, str]) -> dict[str, object]:
    metadata = {"name": name, "namespace": namespace, "labels": labels}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "type": "Opaque", "stringData": content}


def _dump(documents: list[dict[str, object]]) -> str:
    return yaml.safe_dump_all(documents, sort_keys=False)
