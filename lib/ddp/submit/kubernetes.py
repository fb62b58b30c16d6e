"""A run as Kubernetes manifests: an Indexed Job and a headless Service (Kubernetes 1.31).

Each pod is a node of the run and starts torchrun, which meets at pod 0 (c10d rendezvous). The
workspace is the claim that `export-kubernetes` of juicefs-server-proxy makes: code, data and run
lie at the same paths as on Slurm's nodes.
"""

import dataclasses
import hashlib
import pathlib
import re
import shlex

import jinja2
import yaml

from ddp.node import torchrun
from ddp.problem import ParameterError, shown

PORT = 29500  # torchrun's default
MAX_NAME = 52  # a pod is called NAME-INDEX-xxxxx, and a label has 63 characters at most
STOPPED = 75  # exit code of a pod that saved: EX_TEMPFAIL of sysexits(3)
TOKEN_SECRET = "hf"  # noqa: S105 - a Secret with the key `token`, Hugging Face's; it may be missing
_TOKEN_DIR = "/etc/ddp-token"  # noqa: S105 - names a folder
_ENDING_S = 60  # for torchrun and the pods to end, after the ranks have saved
_TEMPLATES = pathlib.Path(__file__).with_name("templates")
_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")  # RFC 1123
_IMAGE = re.compile(r"[a-z0-9](?!.*://)[A-Za-z0-9._:/@-]*")

# Variables of the pod that a user may set, and those that only the manifest sets
_DEFAULTS = ("OMP_NUM_THREADS", "PYTHONUNBUFFERED", "PYTHONPATH")
_RESERVED = ("JOB_COMPLETION_INDEX", "RUN_ATTEMPT_ID", "STOP_FILE", "RUN_DIR", "HF_TOKEN_PATH")


@dataclasses.dataclass(frozen=True)
class Run:
    """A run: its command, resources and folders.

    Raises ParameterError for values that manifests cannot express.
    """

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
        """Refuse values that the options' own alphabets allow and Kubernetes does not."""
        if not _IMAGE.fullmatch(self.image):
            example = "an image in a registry, such as nvcr.io/nvidia/pytorch:25.01-py3"
            raise ParameterError(
                "container-image", f"{shown(self.image)} is not allowed; {example}"
            )
        for name, label in (("claim", self.claim), ("namespace", self.namespace)):
            if not _LABEL.fullmatch(label):
                allowed = "a-z, 0-9 and -, at most 63 characters, no hyphen at either end"
                raise ParameterError(name, f"{shown(label)} is not allowed; {allowed}")
        for name in self.env:
            if name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
                text = f"{name} would be readable in the manifest; make the Secret {TOKEN_SECRET}"
                raise ParameterError("env", text)
            if name in _RESERVED or name in set(_variables(self)) - set(_DEFAULTS):
                raise ParameterError(
                    "env", f"{name} is set by the job itself; choose another variable"
                )
        for text in (*self.command, *self.env.values()):
            if not text.isascii() and re.search("[\ud800-\udfff]", text):
                raise ParameterError(
                    "args", f"{shown(text)} is not UTF-8, and Kubernetes takes no other text"
                )


def object_name(run: str) -> str:
    """Derive a DNS label of at most 52 characters from the run's name.

    A Service's name begins with a letter (RFC 1035). An altered name ends in a digest of the run's
    name, and so does a name that already looks like one.
    """
    name = re.sub(r"[^a-z0-9]+", "-", run.lower()).strip("-")
    if (
        name == run
        and len(name) <= MAX_NAME
        and name[0].isalpha()
        and not re.search(r"-[0-9a-f]{8}\Z", name)
    ):
        return name
    digest = hashlib.sha256(run.encode()).hexdigest()[:8]
    name = name if name[:1].isalpha() else f"run-{name}"
    return f"{name[: MAX_NAME - len(digest) - 1].strip('-')}-{digest}"


def render(run: Run) -> str:
    """Render the Service and the Job as YAML, in the order of their creation.

    Every text is quoted: 1e-3, no and 08 stay strings for every parser.
    """
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        undefined=jinja2.StrictUndefined,
        autoescape=False,  # noqa: S701 - YAML, whose texts the filter `text` quotes
        keep_trailing_newline=True,
    )
    environment.filters["text"] = _quoted
    environment.filters["literal"] = _literal
    return environment.get_template("kubernetes.yaml.j2").render(
        run=run,
        name=object_name(run.name),
        start=_start(),
        variables=_variables(run) | run.env,
        port=PORT,
        stopped=STOPPED,
        ending_s=_ENDING_S,
        token_dir=_TOKEN_DIR,
        token_secret=TOKEN_SECRET,
    )


def _start() -> str:
    """Return the shell script that a pod runs."""
    script = (_TEMPLATES / "pod.sh").read_text()
    return script.replace("AGENT", shlex.quote(torchrun.AGENT)).replace("STOPPED", str(STOPPED))


def _variables(run: Run) -> dict[str, str]:
    """Return the variables of a pod, without those that Kubernetes itself fills in."""
    name = object_name(run.name)
    found = {
        "NNODES": str(run.nodes),
        "NPROC_PER_NODE": str(run.ranks_per_node),
        "MASTER_ADDR": f"{name}-0.{name}",
        "MASTER_PORT": str(PORT),
        "RUN_DIR": run.run_dir,
        "OMP_NUM_THREADS": str(max(1, run.cpus_per_task // run.ranks_per_node)),
        "PYTHONUNBUFFERED": "1",
        "HF_TOKEN_PATH": f"{_TOKEN_DIR}/token",
    }
    if run.python_path:
        found["PYTHONPATH"] = ":".join(run.python_path)
    if not run.gpus_per_node:
        found["CUDA_VISIBLE_DEVICES"] = ""
    return found


def _quoted(value: object) -> str:
    """Quote a value as a string of YAML, in ASCII."""
    return yaml.safe_dump(str(value), default_style='"', width=2**20).strip()


def _literal(value: str) -> str:
    """Escape a value: Kubernetes replaces $(NAME), and $$ by $ (API reference, Container.args)."""
    return value.replace("$", "$$")
