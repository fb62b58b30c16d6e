"""The program of a job is one archive, which the nodes' own Python runs."""

import io
import pathlib
import subprocess
import zipfile

import ddp.node
from ddp.submit import job_program


def test_the_archive_has_the_modules_of_ddp_node():
    with zipfile.ZipFile(io.BytesIO(job_program.archive())) as packed:
        held = {name: packed.read(name).decode() for name in packed.namelist()}
    package = pathlib.Path(ddp.node.__file__).parent
    modules = {f"ddp/node/{path.relative_to(package)}" for path in package.rglob("*.py")}
    assert set(held) == {"__main__.py", "ddp/__init__.py", *modules}
    assert held["ddp/node/supervisor.py"] == (package / "supervisor.py").read_text()


def test_the_archive_of_a_release_is_always_the_same():
    first = job_program.archive()
    job_program.archive.cache_clear()
    assert job_program.archive() == first


def test_plain_python_runs_a_part_and_ends_with_its_exit_code(tmp_path: pathlib.Path):
    path = tmp_path / "ddp.pyz"
    path.write_bytes(job_program.archive())
    argv = ["/usr/bin/python3", "-I", "-S", "-B", path, "activate", tmp_path / "absent.json"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "absent.json" in done.stderr
