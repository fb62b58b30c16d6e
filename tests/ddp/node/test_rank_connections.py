"""The remedy for ranks that never connect, and what Accelerate needs on CPUs."""

import pathlib
import socket
import sys

import pytest

from ddp.node import rank_connections, unpacking

LIGHTNING = "in Trainer(...) or Fabric(...) give num_nodes=2, devices=4"
ACCELERATE = "on CPUs it takes --use_cpu (Trainer), or --env ACCELERATE_USE_CPU=true"
OTHER = "the program has to call init_process_group in each rank"


@pytest.mark.parametrize(
    ("source", "words", "remedy"),
    [
        ("import torch\nimport lightning as L\n", None, LIGHTNING),
        ("if True:\n    from pytorch_lightning import Trainer\n", None, LIGHTNING),
        ("from transformers import Trainer\n", None, ACCELERATE),
        ("import accelerate.utils\n", None, ACCELERATE),
        ("import torch\n# import lightning is not needed\n", None, OTHER),
        ("", ["--module", "trl.scripts.sft", "--use_peft"], ACCELERATE),
        ("", ["-m", "litgpt", "pretrain"], LIGHTNING),
        ("", ["-m", "mypkg.train"], OTHER),
        ("", ["missing.py"], OTHER),
    ],
)
def test_the_remedy_is_that_of_what_the_program_imports(
    tmp_path: pathlib.Path,
    capfd: pytest.CaptureFixture[str],
    source: str,
    words: list[str] | None,
    remedy: str,
):
    script = tmp_path / "train.py"
    script.write_text(source)
    watch = rank_connections.Watch(
        str(tmp_path / "7.r0.remark"), 2, 4, words or [str(script)], 20100
    )
    with open(watch.pipe, "w", closefd=False) as agent:
        agent.write("started\n")
    watch.start(0)
    watch.close(is_done=True)
    line = f"the 8 ranks never connected: each trained alone, unless the program connects them itself; {remedy}"
    assert capfd.readouterr().out == f"[ENV] {line}\n"
    assert (tmp_path / "7.r0.remark").read_text() == f"{line}\n"


@pytest.mark.parametrize(
    ("report", "is_done"), [("", True), ("started\n", False), ("started\nmet\n", True), ("x", True)]
)
def test_no_remark_is_made_of_ranks_that_met_or_failed_or_whose_torch_cannot_tell(
    tmp_path: pathlib.Path, capfd: pytest.CaptureFixture[str], report: str, is_done: bool
):
    watch = rank_connections.Watch(str(tmp_path / "7.r0.remark"), 2, 1, ["train.py"], 20100)
    with open(watch.pipe, "w", closefd=False) as agent:
        agent.write(report)
    watch.start(0)
    watch.close(is_done=is_done)
    assert capfd.readouterr().out == ""
    assert not (tmp_path / "7.r0.remark").exists()


def test_a_connection_is_seen_by_the_process_that_holds_it(tmp_path: pathlib.Path):
    own = pathlib.Path("/proc/self").resolve().name
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert not rank_connections.is_connected(int(own), port)
        with socket.create_connection(("127.0.0.1", port)):
            assert rank_connections.is_connected(int(own), port)
    assert not rank_connections.is_connected(2**22 + 1, port), "there is no such process"


VERSION = {
    "cpu": "__version__ = '2.13.0+cpu'\ncuda: Optional[str] = None\nhip: Optional[str] = None\n",
    "old cpu": "__version__ = '2.2.0'\ndebug = False\ncuda = None\nhip = None\n",
    "cuda": "__version__ = '2.13.0+cu130'\ncuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n",
    "rocm": "__version__ = '2.13.0+rocm7'\ncuda: Optional[str] = None\nhip: Optional[str] = '7.1'\n",
    "unknown": "",
}


@pytest.mark.parametrize(("build", "is_for_cpus"), [(name, "cpu" in name) for name in VERSION])
def test_a_build_for_cpus_is_seen_without_an_import(
    tmp_path: pathlib.Path, build: str, is_for_cpus: bool
):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise SystemExit('imported')\n")
    (tmp_path / "torch" / "version.py").write_text(VERSION[build])
    assert unpacking.is_for_cpus(sys.executable, {"PYTHONPATH": str(tmp_path)}) == is_for_cpus


def test_an_interpreter_without_torch_is_not_taken_for_one_on_cpus(tmp_path: pathlib.Path):
    assert not unpacking.is_for_cpus(sys.executable, {"PYTHONPATH": str(tmp_path)})
    assert not unpacking.is_for_cpus(str(tmp_path / "none"), {})
