"""A prompt on a node, a prompt in a running job, a notebook in a browser, and pdb here."""

import json
import pathlib
import re
import shlex
import typing

import pytest

from functional import browser
from functional.conftest import Cluster, eventually
from functional.test_people import LOGIN, ONE, Person, person

pytestmark = [pytest.mark.trains, pytest.mark.long, pytest.mark.timeout(1500)]
SMALL = "--gpus-per-node 0 --cpus-per-task 1 --memory 1G"
WAITS = """
import os, pathlib, time
while not (pathlib.Path(os.environ["RUN_DIR"]) / "end").exists():
    time.sleep(0.2)
"""
STOPS = """
import os
rank = int(os.environ["RANK"])
breakpoint()
print(f"rank {rank} of {os.environ['WORLD_SIZE']} goes on", flush=True)
"""
CELL = "import os, torch\nprint('torch', torch.ones(3).sum().item(), os.environ['SLURM_JOB_ID'])"


@pytest.fixture(scope="module")
def carol(cluster: Cluster) -> typing.Iterator[Person]:
    cluster.action("install-environment", timeout=1500)
    with person(cluster, "carol", "2003") as one:
        yield one


def types(one: Person, command: str, *lines: str) -> str:
    """Type lines into a command's terminal; return the terminal's content."""
    typed = shlex.quote("".join(f"{line}\n" for line in lines))
    terminal = f"script --quiet --return --command {shlex.quote(command)} /dev/null"
    return one.does(f"(sleep 5; printf %s {typed}; sleep 2) | {terminal}")


def test_a_prompt_on_a_node_has_the_environment_of_jobs_and_leaves_nothing(carol: Person):
    program = "import torch, os; print('seen', torch.__version__, os.environ['SLURMD_NODENAME'])"
    shown = types(carol, f"ddp shell {SMALL}", f"python -c {shlex.quote(program)}", "pwd", "exit")
    assert re.search(r"seen 2\.\d+\.\d+\S* slurmd-[01]", shown)
    assert re.search(r"\(ddp \d+\) ", shown)  # the prompt
    assert eventually(lambda: _queue(carol)) == ""
    assert carol.does(f"ls -A {carol.folder}/runs") == ""


def _queue(one: Person) -> str:
    listed = one.does("squeue --noheader --me")
    assert listed == ""
    return listed


def test_a_prompt_beside_a_running_job_is_on_the_node_of_the_rank(carol: Person):
    carol.does("mkdir -p exp")
    carol.writes("exp/waits.py", WAITS)
    two = ONE.replace("--nodes 1", "--nodes 2")
    carol.does(f"cd exp && ddp submit --run night {two} waits.py")

    def place() -> str:
        answer = carol.tries(f"cat {carol.folder}/runs/night/control/*.hosts")
        assert answer.code == 0
        return answer.out

    hosts = eventually(place).split()
    line = 'echo "on $SLURMD_NODENAME, $SLURM_JOB_NAME, $RUN_DIR"'
    shown = types(carol, "ddp shell night --rank 1", line, "exit")
    assert f"on {hosts[1]}, night, {carol.folder}/runs/night" in shown.replace("\r", "")
    carol.does(f"touch {carol.folder}/runs/night/end")

    def end() -> None:
        assert carol.json("ddp show night --json")["state"] == "COMPLETED"

    eventually(end)


def test_pdb_of_rank_0_has_the_terminal(carol: Person):
    carol.writes("stops.py", STOPS)
    shown = types(carol, "ddp submit --local --ranks 2 stops.py", "p 'rank is', rank", "c")
    assert "('rank is', 0)" in shown
    for rank in (0, 1):
        assert f"rank {rank} of 2 goes on" in shown


def test_a_notebook_opens_in_a_browser_and_runs_a_cell_with_torch(
    carol: Person, tmp_path: pathlib.Path
):
    chromium = browser.find()
    if chromium is None:
        pytest.skip("Chromium is not installed")
    cell: dict[str, object] = {"cell_type": "code", "id": "a", "metadata": {}, "source": CELL}
    cell |= {"outputs": [], "execution_count": None}
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    file = {"cells": [cell], "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}
    carol.does(f"mkdir -p {carol.folder}")
    carol.writes(f"{carol.folder}/cell.ipynb", json.dumps(file))

    shown = carol.json(f"cd {carol.folder} && ddp notebook --json {SMALL}")
    place = f"{carol.folder}/runs/notebook"
    assert carol.does(f"stat -c %a {place}/url") == "600"
    url = carol.does(f"cat {place}/url")
    token = url.partition("token=")[2]
    everywhere = carol.does(f"ps -eo args; cat {place}/logs/*; cat {place}/job.sbatch")
    everywhere += carol.cluster.on(shown["node"].replace("-", "/"), "ps", "-eo", "args")
    assert token not in everywhere + json.dumps(shown)

    address = shown["on-your-laptop"].split(":")[1]
    with browser.page(chromium, tmp_path / "profile", localhost=address) as page:
        page.open(url)
        eventually(lambda: _has(page, ".jp-LabShell"))
        page.open(url.replace("/lab?", "/lab/tree/cell.ipynb?"))
        eventually(lambda: _has(page, '.jp-Notebook-ExecutionIndicator[data-status="idle"]'))
        eventually(lambda: _runs_cell(page))
        eventually(lambda: _shows(page, f"torch 3.0 {shown['job-id']}"))

    carol.does("ddp cancel notebook")
    eventually(lambda: _has_left(carol, shown))


def _has(page: browser.Page, selector: str) -> None:
    assert page.evaluate(f"!!document.querySelector({selector!r})"), page.evaluate(
        "document.body.innerText"
    )


def _runs_cell(page: browser.Page) -> None:
    """Click on the button, which moves while the toolbar fills."""
    page.click("[data-command='notebook:run-cell-and-select-next']")
    prompt = page.evaluate("document.querySelector('.jp-InputPrompt')?.innerText")
    assert prompt in ("[*]:", "[1]:"), prompt


def _shows(page: browser.Page, text: str) -> None:
    output = page.evaluate("document.querySelector('.jp-OutputArea-output')?.innerText")
    assert text in (output or "")


def _has_left(one: Person, shown: dict[str, str]) -> None:
    node = shown["node"].replace("-", "/")
    assert "notebook" not in one.does(f"ls {one.folder}/runs")
    assert one.cluster.exec(node, "sh", "-c", "ls /var/tmp/slurm-ddp-2003/jobs/*").out == ""
    assert one.cluster.exec(LOGIN, "squeue", "--noheader", "--user", one.name).out == ""
