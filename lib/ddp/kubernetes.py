"""A run as Kubernetes manifests: an indexed Job, a headless Service for its pods, a ConfigMap with their program.

For Kubernetes 1.31 and newer (a Job's podFailurePolicy is stable from there on, backoffLimitPerIndex is on by default).
The workspace is the claim that `export-kubernetes` of juicefs-server-proxy makes: it holds code, data and run at the
same paths as on Slurm's nodes. The pods run `ddp.node.pod`; the Job's policy uses its exit codes.
"""

import collections.abc
import hashlib
import pathlib
import re
import typing

import pydantic
import yaml

from ddp.node import pod

PORT = 29500  # torchrun's default; the rendezvous of the pods uses the next one
MAX_NAME = 52  # a pod is called NAME-INDEX-xxxxx, and a label has 63 characters at most
TOKEN_VARIABLE = "HF_TOKEN_PATH"  # noqa: S105 - names a file; huggingface_hub, constants.py

_PROGRAM = pathlib.Path(pod.__file__)
_PROGRAM_DIR = "/etc/ddp"
_TOKEN_DIR = "/etc/ddp-token"  # noqa: S105
_LABEL = r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?"  # RFC 1123
_SUBDOMAIN = rf"(?=.{{1,253}}\Z){_LABEL}(\.{_LABEL})*"
_GRACE_S = 30  # for torchrun and the pods to end, after the ranks have saved

Manifest = dict[str, typing.Any]


def _matches(pattern: str, allowed: str) -> pydantic.AfterValidator:
    compiled = re.compile(pattern, re.ASCII)

    def check(value: str) -> str:
        if not compiled.fullmatch(value):
            raise ValueError(f"{value[:60]!a} is not allowed; {allowed}")
        return value

    return pydantic.AfterValidator(check)


def _image(value: str) -> str:
    if value.startswith("/") or "://" in value:
        raise ValueError(
            f"{value[:60]!a} is not allowed; an image in a registry, such as nvcr.io/nvidia/pytorch:25.01-py3"
        )
    return value.replace("#", "/", 1)  # enroot's notation


def _text(value: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{value[:60]!a} is not UTF-8, as Kubernetes takes it") from None
    if "\0" in value:
        raise ValueError("holds a zero byte")
    return value


_Path = typing.Annotated[
    str,
    _matches(r"/(?!.*(//|/\.{1,2}(/|\Z)))[^\0:]*[^\0:/]", "an absolute path without : and without . and .. as parts"),
]
_Text = typing.Annotated[str, pydantic.AfterValidator(_text)]
_Count = typing.Annotated[int, pydantic.Field(ge=1)]
_DnsLabel = typing.Annotated[
    str, _matches(_LABEL, "a-z, 0-9 and -, 63 characters at most, with no hyphen at either end")
]
_DnsName = typing.Annotated[str, _matches(_SUBDOMAIN, "a-z, 0-9, - and ., as Kubernetes names its objects")]
_Variable = typing.Annotated[str, _matches(r"[A-Za-z_][A-Za-z0-9_]*", "a variable's name")]


class Run(pydantic.BaseModel):
    """A run: its command, resources and folders."""

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid")

    name: typing.Annotated[str, pydantic.Field(min_length=1, max_length=128), pydantic.AfterValidator(_text)]
    image: typing.Annotated[
        str,
        pydantic.AfterValidator(_image),
        _matches(r"[a-z0-9][A-Za-z0-9._:/@-]*", "an image's name, such as nvcr.io/nvidia/pytorch:25.01-py3"),
    ]
    command: typing.Annotated[
        tuple[_Text, ...], pydantic.Field(min_length=1)
    ]  # for torchrun: a script, or --module NAME
    env: dict[_Variable, _Text] = {}
    nodes: _Count = 1
    gpus_per_node: typing.Annotated[int, pydantic.Field(ge=0)] = 0
    ranks_per_node: _Count = 1
    cpus_per_task: _Count = 1  # for each node: its ranks share them
    memory_mb: typing.Annotated[int, pydantic.Field(ge=256)]  # for each node
    time_limit_s: typing.Annotated[int, pydantic.Field(ge=60)] | None = None
    lead_s: _Count = 180  # for saving, before the limit and when a pod is evicted
    workspace: _Path  # the filesystem's mountpoint on Slurm's nodes
    run_dir: _Path
    folder: _Path | None = None  # the working directory, in the snapshot; by default the run's directory
    python_path: tuple[_Path, ...] = ()  # the payload's folder
    claim: _DnsName
    claim_folder: str = ""  # the workspace's folder in the claim's volume; by default its root
    namespace: _DnsLabel = "default"
    token_secret: _DnsName | None = None  # a Secret with the key `token`, Hugging Face's
    uid: _Count | None = None  # who owns the run's directory; by default the image's own account
    gid: _Count | None = None
    max_restarts: typing.Annotated[int, pydantic.Field(ge=0)] = 0

    @pydantic.model_validator(mode="after")
    def _check(self) -> "Run":
        for name in ("run_dir", "folder"):
            path = getattr(self, name)
            if path is not None and not pathlib.PurePosixPath(path).is_relative_to(self.workspace):
                raise ValueError(
                    f"{name}: {path} does not lie in the workspace, {self.workspace}, which is all that the pods mount"
                )
        if pathlib.PurePosixPath(self.claim_folder).is_absolute() or ".." in self.claim_folder.split("/"):
            raise ValueError(f"claim_folder: {self.claim_folder} is not a relative path in the volume")
        for name in sorted(self.env):
            if name in _SECRET_VARIABLES:
                raise ValueError(f"env: {name} would be in the manifest for others to read; give token_secret")
            if name in _RESERVED or name in set(_variables(self)) - _DEFAULTS:
                raise ValueError(f"env: {name} is set by the job itself; choose another variable")
        return self


def object_name(run: str) -> str:
    """Derive the name of a run's objects: a DNS label of at most 52 characters, unique to the run's name.

    A Service's name begins with a letter (RFC 1035). An altered name ends in a digest of the run's name, and so does a
    name that already looks like one.
    """
    name = re.sub(r"[^a-z0-9]+", "-", run.lower()).strip("-")
    if name == run and len(name) <= MAX_NAME and name[0].isalpha() and not re.search(r"-[0-9a-f]{8}\Z", name):
        return name
    digest = hashlib.sha256(run.encode()).hexdigest()[:8]
    name = name if name[:1].isalpha() else f"run-{name}"
    return f"{name[: MAX_NAME - len(digest) - 1].strip('-')}-{digest}"


def manifests(run: Run) -> tuple[Manifest, ...]:
    """Build the Service, the ConfigMap and the Job, in the order in which to create them."""
    name = object_name(run.name)
    labels = {
        "app.kubernetes.io/name": "ddp",
        "app.kubernetes.io/instance": name,
        "app.kubernetes.io/managed-by": "ddp",
    }
    metadata: Manifest = {
        "name": name,
        "namespace": run.namespace,
        "labels": labels,
        "annotations": {"slurm-ddp/run": run.name, "slurm-ddp/run-dir": run.run_dir},
    }
    service: Manifest = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata,
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,  # the rendezvous precedes readiness
            "selector": {"app.kubernetes.io/instance": name},
            "ports": [{"name": "torchrun", "port": PORT}, {"name": "pods", "port": PORT + 1}],
        },
    }
    program: Manifest = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata,
        "data": {_PROGRAM.name: _PROGRAM.read_text()},
    }
    job: Manifest = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": metadata,
        "spec": {
            "completionMode": "Indexed",
            "completions": run.nodes,
            "parallelism": run.nodes,
            # The pods fail together, so each index counts the restarts; the first that has none left fails the Job.
            "backoffLimitPerIndex": run.max_restarts,
            "maxFailedIndexes": 0,
            "podReplacementPolicy": "Failed",  # not before the old pod has ended
            "podFailurePolicy": {
                "rules": [
                    {"action": "FailJob", "onExitCodes": _exits(pod.MISTAKE)},
                    {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                    {"action": "Ignore", "onExitCodes": _exits(pod.STOPPED)},
                ]
            },
            **({"activeDeadlineSeconds": max(30, run.time_limit_s - run.lead_s)} if run.time_limit_s else {}),
            "template": {"metadata": {"labels": labels}, "spec": _pod(run, name, labels)},
        },
    }
    return service, program, job


def render(run: Run) -> str:
    """Dump the manifests as YAML with every value quoted: 1e-3, no and 08 stay strings for every parser."""
    return yaml.dump_all(
        manifests(run), Dumper=_Dumper, sort_keys=False, explicit_start=True, width=2**20, allow_unicode=False
    )


def _pod(run: Run, name: str, labels: dict[str, str]) -> Manifest:
    account = {"runAsUser": run.uid, "runAsGroup": run.gid if run.gid is not None else run.uid}
    volumes: list[Manifest] = [
        {"name": "workspace", "persistentVolumeClaim": {"claimName": run.claim}},
        {"name": "program", "configMap": {"name": name}},
        # NCCL and data loaders share memory; a container has 64 MiB of it by default
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": f"{run.memory_mb // 2}Mi"}},
    ]
    folder = {"subPath": run.claim_folder} if run.claim_folder else {}
    mounts: list[Manifest] = [
        {"name": "workspace", "mountPath": run.workspace, **folder},
        {"name": "program", "mountPath": _PROGRAM_DIR, "readOnly": True},
        {"name": "shm", "mountPath": "/dev/shm"},  # noqa: S108
    ]
    if run.token_secret:
        secret = {"secretName": run.token_secret, "items": [{"key": "token", "path": "token"}]}
        volumes.append({"name": "token", "secret": secret})
        mounts.append({"name": "token", "mountPath": _TOKEN_DIR, "readOnly": True})
    resources = {"cpu": str(run.cpus_per_task), "memory": f"{run.memory_mb}Mi"}
    resources |= {"nvidia.com/gpu": str(run.gpus_per_node)} if run.gpus_per_node else {}
    plain = [{"name": key, "value": _literal(value)} for key, value in (_variables(run) | run.env).items()]
    fields = [{"name": key, "valueFrom": {"fieldRef": {"fieldPath": path}}} for key, path in _FIELDS.items()]
    return {
        "restartPolicy": "Never",  # podFailurePolicy takes no other
        "subdomain": name,
        "terminationGracePeriodSeconds": run.lead_s + _GRACE_S,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": {
            "seccompProfile": {"type": "RuntimeDefault"},
            **({**account, "runAsNonRoot": True} if run.uid is not None else {}),
        },
        "topologySpreadConstraints": [
            {
                "maxSkew": 1,
                "topologyKey": "kubernetes.io/hostname",
                "whenUnsatisfiable": "ScheduleAnyway",
                "labelSelector": {"matchLabels": {"app.kubernetes.io/instance": labels["app.kubernetes.io/instance"]}},
            }
        ],
        "containers": [
            {
                "name": "ranks",
                "image": run.image,
                "command": ["python3", f"{_PROGRAM_DIR}/{_PROGRAM.name}"],
                "args": [_literal(word) for word in run.command],
                "env": fields + plain,
                "ports": [{"name": "torchrun", "containerPort": PORT}, {"name": "pods", "containerPort": PORT + 1}],
                "resources": {"requests": resources, "limits": resources},
                "securityContext": {"allowPrivilegeEscalation": False},
                "volumeMounts": mounts,
            }
        ],
        "volumes": volumes,
    }


# Filled in by Kubernetes.
_FIELDS = {
    "DDP_JOB_UID": "metadata.labels['batch.kubernetes.io/controller-uid']",
    "DDP_POD_NAME": "metadata.name",
    "DDP_POD_IP": "status.podIP",
}
_RESERVED = {*_FIELDS, "DDP_JOIN_S", "JOB_COMPLETION_INDEX", "RUN_ATTEMPT_ID", "STOP_FILE"}
_SECRET_VARIABLES = {"HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"}
_DEFAULTS = {"OMP_NUM_THREADS", "PYTHONUNBUFFERED", "PYTHONFAULTHANDLER", TOKEN_VARIABLE}  # a user may set them


def _variables(run: Run) -> dict[str, str]:
    """Build the variables of the pods' program and the ranks, beside the user's own."""
    name = object_name(run.name)
    found = {
        "NNODES": str(run.nodes),
        "NPROC_PER_NODE": str(run.ranks_per_node),
        "MASTER_ADDR": f"{name}-0.{name}",
        "MASTER_PORT": str(PORT),
        "RUN_DIR": run.run_dir,
        "DDP_FOLDER": run.folder or run.run_dir,
        "OMP_NUM_THREADS": str(max(1, run.cpus_per_task // run.ranks_per_node)),
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
    }
    if run.python_path:
        found["PYTHONPATH"] = ":".join(run.python_path)
    if not run.gpus_per_node:
        found["CUDA_VISIBLE_DEVICES"] = ""
    if run.token_secret:
        found[TOKEN_VARIABLE] = f"{_TOKEN_DIR}/token"
    return found


def _literal(value: str) -> str:
    """Escape a value: Kubernetes replaces $(NAME), and $$ by $ (API reference, Container.args)."""
    return value.replace("$", "$$")


def _exits(code: int) -> Manifest:
    return {"containerName": "ranks", "operator": "In", "values": [code]}


class _Dumper(yaml.SafeDumper):
    """Quotes every string but the keys, and writes programs as blocks."""

    def ignore_aliases(self, data: object) -> bool:
        """Repeat values instead of referring to them."""
        del data
        return True


def _represent_text(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    del dumper
    return yaml.ScalarNode("tag:yaml.org,2002:str", text, style="|" if text.count("\n") > 1 else '"')


def _represent_mapping(dumper: _Dumper, mapping: collections.abc.Mapping[str, object]) -> yaml.MappingNode:
    represent: collections.abc.Callable[[object], yaml.Node] = dumper.represent_data  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    pairs = [(yaml.ScalarNode("tag:yaml.org,2002:str", key), represent(value)) for key, value in mapping.items()]
    return yaml.MappingNode("tag:yaml.org,2002:map", pairs, flow_style=False)


_Dumper.add_representer(str, _represent_text)
_Dumper.add_representer(dict, _represent_mapping)
