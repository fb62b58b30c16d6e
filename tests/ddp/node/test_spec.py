"""job.json: a job's work, written at submission and read in the job."""

import pathlib

from job_specs import make

from ddp.node import spec


def test_a_written_specification_reads_back(tmp_path: pathlib.Path):
    whole = make(
        tmp_path / "runs" / "first",
        command=(spec.Word("RUN_DIR", is_variable=True), spec.Word("$(id) '\" \n")),
        container=spec.Container("x:1", "A,B"),
        accelerate=spec.Accelerate(("--use_fsdp",), "mixed_precision: bf16\n", ".yaml"),
        fabrics=(spec.Fabric("tcp", (("A", "1"),), "", ("/x",), (), "", "", "", (), ()),),
    )
    path = tmp_path / "job.json"
    path.write_text(spec.dump(whole))
    assert spec.load(spec.JobSpec, str(path)) == whole
