"""The batch script, run by bash with doubles of Slurm's commands: end, requeues, addresses."""

import re
import signal
import socket

import pytest
from script_texts import ENDS, MANIFEST, REQUEST, WAITS, stop, texts

from batch_host import Node
from ddp.options import fields, models
from ddp.settings import Settings
from ddp.submit import scripts


def test_torchrun_gets_exactly_the_command(settings: Settings, node: Node):
    node.add("srun", 'printf "%s\\0" "$@" > "$NOTES/argv"; ' + ENDS % "done")
    code, output = node.run(texts(settings), waits=True)
    assert code == 0, output
    argv = (node.notes / "argv").read_text().split("\0")[:-1]
    options = "--nodes=1 --ntasks=1 --ntasks-per-node=1 --cpus-per-task=4 --cpu-bind=none --kill-on-bad-exit=1"
    assert argv[:10] == [*options.split(), "--wait=300", "--label", "--chdir=/", "/bin/sh"]
    program = ["/usr/bin/python3", str(node.run_dir / "program" / "ddp.pyz"), "node"]
    program.append(str(node.run_dir / "program" / "job.json"))
    assert argv[12:] == [*program, *"--module ddptrain smoke --lr 3e-3".split()]
    lines = output.splitlines()
    assert len(lines) == 2, "nothing else is printed"
    assert lines[1] == "[RESULT] rc=0 outcome=done"
    about = (
        r"\[ENV\] job=12 attempt=12\.r0 nodes=slurmd-0 head=127\.0\.0\.1:2\d{4} ranks_per_node=1"
    )
    assert re.fullmatch(about, lines[0])


@pytest.mark.parametrize(
    ("srun", "outcome", "code"),
    [
        (ENDS % "done", True, 0),
        (ENDS % "done" + "; exit 1", True, 0),  # torchrun masks codes: the outcome decides
        (ENDS % "failed" + "; exit 2", True, 2),
        ("exit 0", True, 1),  # a workload of ours that ended without saying so has failed
        ("exit 0", False, 0),
        ("exit 9", False, 9),
        ("exit 143", False, 1),  # what srun did to the other ranks
        ("exit 137", False, 137),  # out of memory
    ],
)
def test_the_exit_code_says_how_it_ended(
    settings: Settings, node: Node, srun: str, outcome: bool, code: int
):
    node.add("srun", srun)
    assert node.run(texts(settings, outcome=outcome))[0] == code
    assert not node.requeued()


def test_a_warning_saves_and_requeues(settings: Settings, node: Node):
    node.add("srun", WAITS + ENDS % "preempted")
    code, output = stop(node, texts(settings), signal.SIGUSR1)
    assert code == 75
    assert node.requeued()
    stamp = r"20\d\d-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z"
    asked = rf"^\[PREEMPT\] {stamp} USR1: \$STOP_FILE asks the ranks to save and leave$"
    assert re.search(asked, output, re.MULTILINE)
    assert re.search(rf"^\[REQUEUE\] {stamp} job 12 is queued again$", output, re.MULTILINE)
    assert (node.run_dir / "control" / "12.r0.stop").exists()


@pytest.mark.parametrize(
    ("number", "outcome", "state", "code"),
    [
        pytest.param(signal.SIGTERM, "preempted", "RUNNING", 75, id="cancelled"),
        pytest.param(signal.SIGUSR1, "preempted", "COMPLETING", 75, id="no longer running"),
        pytest.param(signal.SIGUSR1, "done", "RUNNING", 0, id="warned at the very end"),
    ],
)
def test_a_job_that_has_ended_is_not_requeued(
    settings: Settings, node: Node, number: signal.Signals, outcome: str, state: str, code: int
):
    node.add("srun", WAITS + ENDS % outcome)
    assert stop(node, texts(settings), number, STATE=state)[0] == code
    assert not node.requeued()


def test_a_job_is_requeued_only_so_often(settings: Settings, node: Node):
    node.add("srun", WAITS + ENDS % "preempted")
    files = texts(settings, max_requeues=2)
    assert stop(node, files, signal.SIGUSR1, SLURM_RESTART_COUNT="2")[0] == 75
    assert not node.requeued()
    (node.notes / "started").unlink()
    assert stop(node, files, signal.SIGUSR1, SLURM_RESTART_COUNT="1")[0] == 75
    assert node.requeued()


def test_an_earlier_attempts_stop_file_is_removed(settings: Settings, node: Node):
    (node.run_dir / "control").mkdir(parents=True)
    (node.run_dir / "control" / "12.r0.stop").touch()
    node.add("srun", '[ -e "$STOP_FILE" ] && exit 5; ' + ENDS % "done")
    assert node.run(texts(settings))[0] == 0


def route(address: str) -> str:
    """Return this machine's own address on the route to another one, or "" without a route."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, 9))
        except OSError:
            return ""
        return probe.getsockname()[0]


@pytest.mark.parametrize("hosts", ["slurmd-0 slurmd-1", "slurmd-1 slurmd-0"])
def test_nodes_are_reached_by_the_addresses_that_slurm_has_not_by_their_names(
    settings: Settings, node: Node, hosts: str
):
    """The batch node need not be the first by name."""
    for name in hosts.split():
        with pytest.raises(socket.gaierror):
            socket.getaddrinfo(name, None)
    node.hosts, node.addresses = hosts, {"slurmd-0": "203.0.113.6", "slurmd-1": "203.0.113.7"}
    node.add("srun", 'echo "head=$HEAD_IP of $HEAD_NODE"; ' + ENDS % "done")
    code, output = node.run(texts(settings), SLURM_JOB_NUM_NODES="2")
    if own := route("203.0.113.7"):
        assert code == 0, output
        assert f"head={own} of slurmd-0" in output.splitlines()
    else:
        assert code == 78
        assert (
            "[FATAL] slurmd-0: no route to 203.0.113.7 (slurmd-1): Network is unreachable; see: ip"
            in output
        )


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("127.0.1.1", "is 127.0.1.1, a loopback address"),
        (
            "nowhere.invalid",
            "is nowhere.invalid, which is not an IPv4 address and does not resolve (",
        ),
        ("fd00::7", "is fd00::7, which is not an IPv4 address and does not resolve ("),
    ],
)
def test_an_address_in_slurm_that_cannot_be_used_is_an_error_with_the_command_that_changes_it(
    settings: Settings, node: Node, address: str, words: str
):
    node.hosts, node.addresses = (
        "slurmd-0 slurmd-1",
        {"slurmd-0": "203.0.113.6", "slurmd-1": address},
    )
    node.add("srun", "exit 99")
    code, output = node.run(texts(settings), SLURM_JOB_NUM_NODES="2")
    assert code == 78
    assert f"[FATAL] slurmd-0: the address of slurmd-1 in Slurm (NodeAddr) {words}" in output
    assert output.rstrip().endswith(
        "; as an administrator: scontrol update nodename=slurmd-1 nodeaddr=ADDRESS"
    )


def test_a_node_whose_address_slurm_does_not_give_is_an_error(settings: Settings, node: Node):
    node.hosts, node.addresses = "slurmd-0 slurmd-1", {"slurmd-0": "203.0.113.6"}
    code, output = node.run(texts(settings), SLURM_JOB_NUM_NODES="2")
    assert (code, output) == (78, "[FATAL] slurmd-0: Slurm gave no address of slurmd-1\n")


def test_a_controller_that_restarts_is_asked_again_for_the_addresses(
    settings: Settings, node: Node
):
    node.hosts = "slurmd-0 slurmd-1"
    silent = "slurm_load_node error: Unable to contact slurm controller (connect failure)"
    node.add(
        "scontrol",
        f'case $2 in hostnames) printf "%s\\n" $HOSTS ;; *) echo "{silent}" >&2; exit 1 ;; esac',
    )
    code, output = node.run(texts(settings), SLURM_JOB_NUM_NODES="2")
    assert code == 78
    assert [line for line in output.splitlines() if line.startswith("slept")] == [
        f"slept {pause}" for pause in (1, 2, 4, 8, 15, 30, 60)
    ]
    assert f"[ENV] Slurm gave no addresses of the nodes ({silent}); asking again in 1 s" in output
    assert output.endswith(
        f"[FATAL] slurmd-0: Slurm gave no addresses of slurmd-0 slurmd-1: {silent}\n"
    )


def test_a_port_that_is_taken_is_passed_over(settings: Settings, node: Node):
    node.add("srun", 'echo "port=$HEAD_PORT"; ' + ENDS % "done")
    files, first = texts(settings), 20500
    node.change("network.py", "range(20000, 30000)", f"range({first}, {first + 3})")
    with socket.create_server(("", first)), socket.create_server(("", first + 1)):
        outputs = [node.run(files)[1] for _ in range(4)]
    for output in outputs:
        assert f"port={first + 2}" in output
        assert set(re.findall(r"\[ENV\] port (\d+) is taken, trying another", output)) <= {
            str(first),
            str(first + 1),
        }


def test_a_program_that_meets_by_itself_has_another_port_than_torchrun(
    settings: Settings, node: Node
):
    node.add("srun", 'echo "ports=$HEAD_PORT,$PROGRAM_PORT"; ' + ENDS % "done")
    output = node.run(texts(settings, outcome=False, launcher="node"))[1]
    ports = set(re.findall(r"ports=(\d+),(\d+)", output)[0])
    assert len(ports) == 2
    assert all(20000 <= int(port) < 30000 for port in ports)


def test_the_ports_of_a_jobs_attempts_follow_from_nothing(settings: Settings, node: Node):
    node.add("srun", 'echo "port=$HEAD_PORT"; ' + ENDS % "done")
    ports = [int(re.findall(r"port=(\d+)", node.run(texts(settings))[1])[0]) for _ in range(3)]
    assert len(set(ports)) > 1, "the job and its attempt are the same"
    assert all(20000 <= port < 30000 for port in ports)


def test_a_runs_own_checkpoint_goes_before_the_one_it_began_from(settings: Settings, node: Node):
    node.add("srun", 'echo "${!#}"; ' + ENDS % "done")
    program = scripts.Program(("x", scripts.RESUME), leaves_outcome=True, resume="/mnt/runs/base")
    params = fields.parse(models.SubmitDdp, {})
    made = MANIFEST.model_copy(update={"folder": str(settings.workspace.environments)})
    files = scripts.TrainingJob(settings, REQUEST, params, "first", program).texts(made)
    assert "/mnt/runs/base" in node.run(files)[1].splitlines()
    (node.run_dir / "latest").symlink_to("epoch-1")
    (node.run_dir / "epoch-1").mkdir()
    assert "auto" in node.run(files)[1].splitlines()
