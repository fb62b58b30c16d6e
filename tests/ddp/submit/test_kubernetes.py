"""The manifests of a run: checked by Kubernetes' own schemas, and a program's view in its pods."""

import os
import pathlib
import re
import subprocess
import typing

import hypothesis
import hypothesis.strategies as st
import kubernetes_validate  # pyright: ignore[reportMissingTypeStubs]
import pytest
import yaml

from ddp.problem import ParameterError
from ddp.submit import kubernetes

VERSIONS = ("1.31", "1.33", "1.35")
Manifest = dict[str, typing.Any]
RUN: dict[str, typing.Any] = {
    "name": "night",
    "image": "nvcr.io/nvidia/pytorch:25.01-py3",
    "command": ("train.py", "--lr", "1e-3"),
    "nodes": 2,
    "gpus_per_node": 4,
    "ranks_per_node": 4,
    "cpus_per_task": 16,
    "memory_mb": 65536,
    "time_limit_s": 7200,
    "workspace": "/mnt/shared",
    "run_dir": "/mnt/shared/users/a/runs/night",
    "claim": "shared",
    "uid": 1000,
    "max_restarts": 3,
}
LEAST = {
    name: RUN[name]
    for name in ("name", "image", "command", "memory_mb", "workspace", "run_dir", "claim")
}
FULL = RUN | {
    "env": {"NCCL_DEBUG": "INFO", "OMP_NUM_THREADS": "2"},
    "python_path": ("/mnt/shared/payload",),
    "namespace": "training",
    "gid": 100,
}


def run(**given: typing.Any) -> kubernetes.Run:
    return kubernetes.Run(**(RUN | given))


def parts(run: kubernetes.Run) -> tuple[Manifest, Manifest]:
    """Return Service and Job as a reader of the YAML has them."""
    service, job = yaml.safe_load_all(kubernetes.render(run))
    return service, job


def container(run: kubernetes.Run) -> tuple[Manifest, Manifest]:
    """Return the pod's specification and its container's."""
    spec = parts(run)[1]["spec"]["template"]["spec"]
    return spec, spec["containers"][0]


def variables(run: kubernetes.Run) -> dict[str, str]:
    return {one["name"]: one["value"] for one in container(run)[1]["env"] if "value" in one}


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("given", [RUN, LEAST, FULL], ids=["usual", "least", "full"])
def test_the_schemas_of_kubernetes_take_every_object(given: dict[str, typing.Any], version: str):
    found = list(yaml.safe_load_all(kubernetes.render(kubernetes.Run(**given))))
    assert [one["kind"] for one in found] == ["Service", "Job"]
    for one in found:
        assert kubernetes_validate.validate(one, version, strict=True) == version


def test_the_pods_find_each_other():
    service, job = parts(run(nodes=16))
    spec = job["spec"]
    assert (spec["completionMode"], spec["completions"], spec["parallelism"]) == ("Indexed", 16, 16)
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"] is True
    assert spec["template"]["spec"]["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"].items() <= spec["template"]["metadata"]["labels"].items()
    found = variables(run(nodes=16))
    assert found["MASTER_ADDR"] == f"{job['metadata']['name']}-0.{service['metadata']['name']}"
    assert (found["NNODES"], found["NPROC_PER_NODE"], found["MASTER_PORT"]) == ("16", "4", "29500")
    assert [one["port"] for one in service["spec"]["ports"]] == [29500]
    assert {one["metadata"]["namespace"] for one in parts(run(namespace="x"))} == {"x"}


def test_the_resources_of_a_pod():
    spec, ranks = container(run())
    assert ranks["resources"]["limits"] == {"cpu": "16", "memory": "65536Mi", "nvidia.com/gpu": "4"}
    assert (
        ranks["resources"]["requests"] == ranks["resources"]["limits"]
    )  # or the kernel may take a rank's memory
    assert {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "32768Mi"}} in spec[
        "volumes"
    ]
    assert {"name": "shm", "mountPath": "/dev/shm"} in ranks["volumeMounts"]
    assert "CUDA_VISIBLE_DEVICES" not in variables(run())
    alone = run(gpus_per_node=0, ranks_per_node=2)
    assert variables(alone)["CUDA_VISIBLE_DEVICES"] == ""
    assert variables(alone)["OMP_NUM_THREADS"] == "8"
    assert "nvidia.com/gpu" not in container(alone)[1]["resources"]["limits"]
    assert (spec["securityContext"]["runAsUser"], spec["securityContext"]["runAsGroup"]) == (
        1000,
        1000,
    )
    assert "runAsUser" not in container(run(uid=None))[0]["securityContext"]
    assert spec["automountServiceAccountToken"] is False


def test_the_workspace_is_the_exported_claim_at_the_same_path():
    spec, ranks = container(run(claim="volume"))
    assert {"name": "workspace", "persistentVolumeClaim": {"claimName": "volume"}} in spec[
        "volumes"
    ]
    assert {"name": "workspace", "mountPath": "/mnt/shared"} in ranks["volumeMounts"]
    assert variables(run())["RUN_DIR"] == RUN["run_dir"]


def test_the_token_is_a_reference_to_a_secret_that_may_be_missing():
    spec, ranks = container(run())
    assert variables(run())["HF_TOKEN_PATH"] == "/etc/ddp-token/token"
    assert {"name": "token", "mountPath": "/etc/ddp-token", "readOnly": True} in ranks[
        "volumeMounts"
    ]
    secret = next(one["secret"] for one in spec["volumes"] if one["name"] == "token")
    assert secret == {"secretName": "hf", "optional": True}


def test_how_it_ends():
    spec = parts(run())[1]["spec"]
    assert spec["activeDeadlineSeconds"] == 7200 - 180
    assert spec["template"]["spec"]["terminationGracePeriodSeconds"] >= 180
    assert "activeDeadlineSeconds" not in parts(run(time_limit_s=None))[1]["spec"]
    assert (spec["backoffLimitPerIndex"], spec["maxFailedIndexes"]) == (3, 0)
    assert spec["template"]["spec"]["restartPolicy"] == "Never"
    name = spec["template"]["spec"]["containers"][0]["name"]
    rules = {
        code: rule["action"]
        for rule in spec["podFailurePolicy"]["rules"]
        for code in (rule["onExitCodes"]["values"] if "onExitCodes" in rule else ["disrupted"])
        if rule.get("onExitCodes", {}).get("containerName", name) == name
    }
    assert rules == {75: "Ignore", "disrupted": "Ignore"}


# --- names ---------------------------------------------------------------------------------------


@hypothesis.given(
    st.lists(st.text("aB0._-é", min_size=1, max_size=70), min_size=2, max_size=8, unique=True)
)
def test_names_are_labels_and_differ(names: list[str]):
    found = [kubernetes.object_name(name) for name in names]
    assert all(
        re.fullmatch(r"[a-z]([a-z0-9-]*[a-z0-9])?", name) and len(f"{name}-4095-xxxxx") <= 63
        for name in found
    )
    assert len(set(found)) == len(names)
    assert all(kubernetes.object_name(name) == name for name in ("night", "gpt-20260101-1200", "a"))


def test_a_name_cannot_be_made_to_look_like_another_s():
    assert kubernetes.object_name(kubernetes.object_name("Night")) != kubernetes.object_name(
        "Night"
    )


# --- user input
# ------------------------------------------------------------------------------------


def expand(text: str, env: dict[str, str]) -> str:
    """Expand a text as the kubelet does: third_party/forked/golang/expansion/expand.go of Kubernetes."""
    return re.sub(
        r"\$(?:\$|\(([^)]*)\))",
        lambda found: "$" if found[0] == "$$" else env.get(found[1], found[0]),
        text,
    )


# YAML 1.1, 1.2 or Go's parser read some of these as numbers, booleans, null, dates or sexagesimals
# if bare.
ODD = (
    *"1e-3 1e3 0o17 017 0x1f 1_000 1:30 no Yes on y null ~ # &a *a !t | > % @ ` {a} [a] 2026-01-01 .inf = <<".split(),
    *"\u00e9 \U0001f600 \x1b[31m ' \" \\n $HOME $(HOME) $$(HOME) $$$ $ $( ${A}".split(),
    *("", " a ", "- a", "a: b", "\t", "a\nb\n\nc\n", "\u2028", "\x85"),
)


def test_words_and_variables_arrive_as_they_are_written():
    odd = run(
        command=("train.py", *ODD), env={f"V{number}": text for number, text in enumerate(ODD)}
    )
    ranks, env = container(odd)[1], {"HOME": "/expanded", "A": "expanded"}
    assert [expand(word, env) for word in ranks["args"]] == ["train.py", *ODD]
    assert all(f'- "{word}"\n' in kubernetes.render(odd) for word in ("1e-3", "no", "1:30")), (
        "a number for no parser"
    )
    found = variables(odd)
    assert [expand(found[f"V{number}"], env) for number in range(len(ODD))] == list(ODD)


@hypothesis.settings(max_examples=25)
@hypothesis.given(st.text(st.characters(exclude_characters="\0", codec="utf-8"), max_size=30))
def test_any_text_arrives(text: str):
    _, ranks = container(run(command=("train.py", text)))
    assert expand(ranks["args"][1], {"": "x", "HOME": "x"}) == text


@pytest.mark.parametrize(
    ("field", "value", "problem"),
    [
        ("image", "/images/torch.sqsh", "an image in a registry"),
        ("image", "docker://x", "an image in a registry"),
        ("claim", "My_Claim", "no hyphen"),
        ("namespace", "a.b", "no hyphen"),
        ("env", {"MASTER_ADDR": "x"}, "is set by the job itself"),
        ("env", {"STOP_FILE": "x"}, "is set by the job itself"),
        ("env", {"HF_TOKEN": "hf_x"}, "would be readable in the manifest"),
        ("command", ("train.py", "\udcff"), "is not UTF-8"),
    ],
)
def test_impossible_manifests_are_refused(field: str, value: object, problem: str):
    with pytest.raises(ParameterError, match=re.escape(problem)):
        run(**{field: value})


# --- the command of a pod ------------------------------------------------------------------------

TORCHRUN = """
import os, pathlib, signal, sys, time
print(os.environ["JOB_COMPLETION_INDEX"], *sys.argv[1:], os.getcwd(), flush=True)
action, stop = os.environ["ACTION"], pathlib.Path(os.environ["STOP_FILE"])
while action == "preempted" and not stop.exists():
    time.sleep(0.05)
if action == "preempted":
    (stop.parent / f"{os.environ['RUN_ATTEMPT_ID']}.outcome").write_text('{"outcome": "preempted"}')
sys.exit(action != "done")
"""


def pod(tmp_path: pathlib.Path, action: str, index: int = 0) -> subprocess.Popen[str]:
    """Start the command of a pod as the kubelet does, with a double of torchrun."""
    package = tmp_path / "torch" / "distributed"
    package.mkdir(parents=True, exist_ok=True)
    for path, text in (("torch/__init__.py", ""), ("torch/distributed/run.py", TORCHRUN)):
        (tmp_path / path).write_text(text)
    here = {
        "workspace": str(tmp_path),
        "run_dir": f"{tmp_path}/run",
        "workdir": f"{tmp_path}/my proj$",
    }
    pathlib.Path(here["workdir"]).mkdir()
    (tmp_path / "my proj$" / "torch.py").write_text(
        "raise SystemExit('the agent imports nothing from there')"
    )
    ranks = container(run(**here, command=("train.py", "two words")))[1]
    env = {
        "PATH": os.environ["PATH"],
        "RUN_ATTEMPT_ID": "8f0c",
        "ACTION": action,
        "JOB_COMPLETION_INDEX": str(index),
    }
    for one in ranks["env"][1:]:
        env[one["name"]] = re.sub(r"\$\((\w+)\)", lambda found: env[found[1]], one["value"])
    argv = [expand(word, {}) for word in (*ranks["command"], *ranks["args"])]
    return subprocess.Popen(
        argv, env=env | {"PYTHONPATH": str(tmp_path)}, stdout=subprocess.PIPE, text=True
    )


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize(("action", "code"), [("done", 0), ("failed", 1)])
def test_a_pod_starts_torchrun_and_ends_as_it_does(
    tmp_path: pathlib.Path, action: str, code: int, index: int
):
    left = tmp_path / "run" / "control" / "8f0c.outcome"
    left.parent.mkdir(parents=True)
    if index == 0:  # which removes the outcome of the attempt before
        left.write_text('{"outcome": "preempted"}')
    found = pod(tmp_path, action, index)
    out = found.communicate(timeout=120)[0]
    assert found.returncode == code
    assert (
        f"--rdzv-endpoint=night-0.night:29500 --rdzv-conf=is_host={'true' if index == 0 else 'false'},"
        in out
    )
    assert out.endswith(f"train.py two words {tmp_path}/my proj$\n")


def test_an_evicted_pod_asks_its_ranks_to_save_and_is_started_again(tmp_path: pathlib.Path):
    found = pod(tmp_path, "preempted")
    assert found.stdout is not None
    found.stdout.readline()
    found.terminate()
    found.communicate(timeout=120)
    assert found.returncode == kubernetes.STOPPED
