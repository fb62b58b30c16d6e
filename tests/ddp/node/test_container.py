"""How the ranks' image is started, depending on the node's tools."""

import pathlib

import job_specs
import pytest

from ddp.node import container, exit_codes, spec

FIXED = ("25.05.9", "25.11.8", "26.05.4")


@pytest.fixture
def node(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """A node with the OCI runtime of Slurm alone."""
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/bin")
    (tmp_path / "oci.conf").write_text("RunTimeRun=crun\n")
    return tmp_path


def start(node: pathlib.Path, version: str, fixed: tuple[str, ...]) -> list[str]:
    """Return srun's options for an imported image under this Slurm."""
    srun = node / "bin" / "srun"
    srun.write_text(f"#!/bin/sh\necho slurm-wlm {version}\n")
    srun.chmod(0o755)
    archive = spec.Archive("/mnt/shared/environments/image.tar.zst", "0" * 64, 1, "", ())
    imported = spec.Environment(
        layers=(archive,), cache=str(node / "cache"), python="", trusted_uids=()
    )
    image = spec.Container("torch", "A", oci_fixed=fixed)
    job = job_specs.make(node / "runs" / "r", container=image, environment=imported)
    env = {"SLURM_CONF": str(node / "slurm.conf"), "SLURM_JOB_ID": "7"}
    return container.launch(job, [], ["true"], env)[0]


@pytest.mark.parametrize(
    ("version", "fixed"), [("25.11.8", FIXED), ("26.11.0", FIXED), ("24.11.5", ())]
)
def test_slurm_s_runtime_starts_the_bundle(
    node: pathlib.Path, version: str, fixed: tuple[str, ...]
):
    (option,) = start(node, version, fixed)
    assert option.startswith("--container=")
    assert option.endswith("/jobs/7")


@pytest.mark.parametrize("version", ["24.11.5", "25.11.2"])
def test_a_slurm_without_the_fix_of_its_runtime_is_refused_with_the_cve(
    node: pathlib.Path, version: str
):
    with pytest.raises(exit_codes.FatalError) as caught:
        start(node, version, FIXED)
    assert str(caught.value).startswith(
        f"container-image: Slurm {version}'s OCI runtime has CVE-2026-65109, fixed in 25.05.9, "
    )
    assert "--accept-risk" in str(caught.value)
