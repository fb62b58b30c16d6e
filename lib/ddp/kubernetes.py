"""A run as Kubernetes manifests: an Indexed Job and a headless Service, for Kubernetes 1.31 and newer.

Each pod is a node of the run and starts torchrun, which meets at pod 0 (c10d rendezvous). The workspace is the claim
that `export-kubernetes` of juicefs-server-proxy makes: code, data and run lie at the same paths as on Slurm's nodes.
"""

import dataclasses
import hashlib
import json
import re
import typing

import yaml

from ddp.base import ParameterError, shown
from ddp.node import node

PORT = 29500  # torchrun's default
MAX_NAME = 52  # a pod is called NAME-INDEX-xxxxx, and a label has 63 characters at most
FAILED, STOPPED = 1, 75  # exit codes of a pod; 75 is EX_TEMPFAIL of sysexits(3)
TOKEN_SECRET = "hf"  # noqa: S105 - a Secret with the key `token`, Hugging Face's; it may be missing
_TOKEN_DIR = "/etc/ddp-token"  # noqa: S105 - names a folder
_GRACE_S = 60  # for torchrun and the pods to end, after the ranks have saved
_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")  # RFC 1123
_IMAGE = re.compile(r"[a-z0-9](?!.*://)[A-Za-z0-9._:/@-]*")

# SIGTERM (an eviction, a deletion, the deadline) makes $STOP_FILE, which all ranks see; a program saves then, leaves
# {"outcome": "preempted"} in the attempt's outcome, and the pod exits with 75, which counts as no failure.
_START = f"""\
mkdir -p "$RUN_DIR/control" "$RUN_DIR/logs" && cd "$0" || exit {FAILED}
[ -w "${{HOME:-/nonexistent}}" ] || export HOME=/tmp
outcome=$RUN_DIR/control/$RUN_ATTEMPT_ID.outcome
is_host=false
[ "$JOB_COMPLETION_INDEX" != 0 ] || {{ is_host=true; rm -f "$STOP_FILE" "$outcome"; }}
python3 -c '{node.AGENT}' --nnodes="$NNODES" --nproc-per-node="$NPROC_PER_NODE" --rdzv-backend=c10d \\
  --rdzv-id="$RUN_ATTEMPT_ID" --rdzv-endpoint="$MASTER_ADDR:$MASTER_PORT" \\
  --rdzv-conf="is_host=$is_host,join_timeout=1800" --log-dir="$RUN_DIR/logs" --tee=3 "$@" &
ranks=$!
trap 'touch "$STOP_FILE"' TERM
while kill -0 $ranks 2>/dev/null; do wait $ranks; code=$?; done
[ $code = 0 ] || ! grep -qs '"preempted"' "$outcome" || code={STOPPED}
exit $code
"""

Manifest = dict[str, typing.Any]


# Variables of the pod that a user may set, and those that only the manifest sets
_DEFAULTS = ("OMP_NUM_THREADS", "PYTHONUNBUFFERED", "PYTHONPATH")
_RESERVED = ("JOB_COMPLETION_INDEX", "RUN_ATTEMPT_ID", "STOP_FILE", "RUN_DIR", "HF_TOKEN_PATH")


@dataclasses.dataclass(frozen=True)
class Run:
    """A run: its command, resources and folders. Raises ParameterError for what manifests cannot express."""

    name: str
    image: str
    command: tuple[str, ...]  # for torchrun
    workspace: str  # the filesystem's mountpoint on Slurm's nodes
    run_dir: str
    claim: str
    memory_mb: int  # for each node
    namespace: str = "default"
    env: dict[str, str] = dataclasses.field(default_factory=dict[str, str])
    nodes: int = 1
    gpus_per_node: int = 0
    ranks_per_node: int = 1
    cpus_per_task: int = 1  # for each node: its ranks share them
    time_limit_s: int | None = None
    lead_s: int = 180  # for saving, before the limit and when a pod is evicted
    workdir: str = ""  # that the ranks start in
    python_path: tuple[str, ...] = ()
    uid: int | None = None  # who owns the run's directory; by default the image's own account
    gid: int | None = None
    max_restarts: int = 0

    def __post_init__(self) -> None:
        """Check what the options' own alphabets allow and Kubernetes does not."""
        if not _IMAGE.fullmatch(self.image):
            example = "an image in a registry, such as nvcr.io/nvidia/pytorch:25.01-py3"
            raise ParameterError("container-image", f"{shown(self.image)} is not allowed; {example}")
        for name, label in (("claim", self.claim), ("namespace", self.namespace)):
            if not _LABEL.fullmatch(label):
                allowed = "a-z, 0-9 and -, at most 63 characters, no hyphen at either end"
                raise ParameterError(name, f"{shown(label)} is not allowed; {allowed}")
        for name in self.env:
            if name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
                text = f"{name} would be readable in the manifest; make the Secret {TOKEN_SECRET}"
                raise ParameterError("env", text)
            if name in _RESERVED or name in set(_variables(self)) - set(_DEFAULTS):
                raise ParameterError("env", f"{name} is set by the job itself; choose another variable")
        for text in (*self.command, *self.env.values()):
            if not text.isascii() and re.search("[\ud800-\udfff]", text):
                raise ParameterError("args", f"{shown(text)} is not UTF-8, and Kubernetes takes no other text")


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


def manifests(run: Run) -> tuple[Manifest, Manifest]:
    """Build the Service and the Job, in the order in which to create them."""
    name = object_name(run.name)
    labels = {"app.kubernetes.io/name": "ddp", "app.kubernetes.io/instance": name}
    metadata = {"name": name, "namespace": run.namespace, "labels": labels, "annotations": {"slurm-ddp/run": run.name}}
    service = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,  # the rendezvous precedes readiness
        "selector": labels,
        "ports": [{"name": "torchrun", "port": PORT}],
    }
    rules = [
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        {"action": "Ignore", "onExitCodes": {"containerName": "ranks", "operator": "In", "values": [STOPPED]}},
    ]
    job: Manifest = {
        "completionMode": "Indexed",
        "completions": run.nodes,
        "parallelism": run.nodes,
        # The pods fail together, so each index counts the restarts; the first that has none left fails the Job
        "backoffLimitPerIndex": run.max_restarts,
        "maxFailedIndexes": 0,
        "podReplacementPolicy": "Failed",  # not before the old pod has ended
        "podFailurePolicy": {"rules": rules},
        "template": {"metadata": {"labels": labels}, "spec": _pod(run, name, labels)},
    }
    if run.time_limit_s:
        job["activeDeadlineSeconds"] = max(30, run.time_limit_s - run.lead_s)
    return (
        {"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": service},
        {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": job},
    )


def render(run: Run) -> str:
    """Dump the manifests as YAML with every value quoted: 1e-3, no and 08 stay strings for every parser."""
    own = json.loads(json.dumps(manifests(run)))  # no value twice, to which YAML would refer
    return yaml.dump_all(own, Dumper=_Dumper, sort_keys=False, explicit_start=True, width=2**20, allow_unicode=False)


def _pod(run: Run, name: str, labels: dict[str, str]) -> Manifest:
    volumes: list[Manifest] = [
        {"name": "workspace", "persistentVolumeClaim": {"claimName": run.claim}},
        {"name": "token", "secret": {"secretName": TOKEN_SECRET, "optional": True}},
        # NCCL and data loaders share memory; a container has 64 MiB of it by default
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": f"{run.memory_mb // 2}Mi"}},
    ]
    mounts: list[Manifest] = [
        {"name": "workspace", "mountPath": run.workspace},
        {"name": "token", "mountPath": _TOKEN_DIR, "readOnly": True},
        {"name": "shm", "mountPath": "/dev/shm"},  # noqa: S108
    ]
    resources = {"cpu": str(run.cpus_per_task), "memory": f"{run.memory_mb}Mi"}
    resources |= {"nvidia.com/gpu": str(run.gpus_per_node)} if run.gpus_per_node else {}
    security: Manifest = {"seccompProfile": {"type": "RuntimeDefault"}}
    if run.uid is not None:
        security |= {"runAsUser": run.uid, "runAsGroup": run.gid or run.uid, "runAsNonRoot": True}
    attempt = {"fieldRef": {"fieldPath": "metadata.labels['batch.kubernetes.io/controller-uid']"}}
    spread = {"maxSkew": 1, "topologyKey": "kubernetes.io/hostname", "whenUnsatisfiable": "ScheduleAnyway"}
    return {
        "restartPolicy": "Never",  # podFailurePolicy takes no other
        "subdomain": name,
        "terminationGracePeriodSeconds": run.lead_s + _GRACE_S,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": security,
        "topologySpreadConstraints": [{**spread, "labelSelector": {"matchLabels": labels}}],
        "containers": [
            {
                "name": "ranks",
                "image": run.image,
                "command": ["/bin/sh", "-c", _literal(_START), _literal(run.workdir or run.run_dir)],
                "args": [_literal(word) for word in run.command],
                "env": [
                    {"name": "RUN_ATTEMPT_ID", "valueFrom": attempt},
                    {"name": "STOP_FILE", "value": f"{_literal(run.run_dir)}/control/$(RUN_ATTEMPT_ID).stop"},
                    *({"name": key, "value": _literal(value)} for key, value in (_variables(run) | run.env).items()),
                ],
                "resources": {"requests": resources, "limits": resources},
                "securityContext": {"allowPrivilegeEscalation": False},
                "volumeMounts": mounts,
            }
        ],
        "volumes": volumes,
    }


def _variables(run: Run) -> dict[str, str]:
    name = object_name(run.name)
    return {
        "NNODES": str(run.nodes),
        "NPROC_PER_NODE": str(run.ranks_per_node),
        "MASTER_ADDR": f"{name}-0.{name}",
        "MASTER_PORT": str(PORT),
        "RUN_DIR": run.run_dir,
        "OMP_NUM_THREADS": str(max(1, run.cpus_per_task // run.ranks_per_node)),
        "PYTHONUNBUFFERED": "1",
        **({"PYTHONPATH": ":".join(run.python_path)} if run.python_path else {}),
        **({} if run.gpus_per_node else {"CUDA_VISIBLE_DEVICES": ""}),
        "HF_TOKEN_PATH": f"{_TOKEN_DIR}/token",
    }


def _literal(value: str) -> str:
    """Escape a value: Kubernetes replaces $(NAME), and $$ by $ (API reference, Container.args)."""
    return value.replace("$", "$$")


class _Dumper(yaml.SafeDumper):
    """Quotes every string."""


_Dumper.add_representer(
    str, lambda _, text: yaml.ScalarNode("tag:yaml.org,2002:str", text, style="|" if text == _literal(_START) else '"')
)
