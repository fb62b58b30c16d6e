"""GPUs that appear, vanish and return on real slurmd and slurmctld: Slurm follows, no job is lost.

`sandboxctl gpus` adds or removes a card without an event for charms; `update-status` stands for
Juju's, every five minutes. The controller's gres.conf is upstream's `AutoDetect=nvidia`. While a
test runs, a watch on the controller's machine looks at the nodes: if Slurm refuses a node
(INVALID_REG), even for a moment, the test fails, unless one of its cards is missing.
"""

import re
import shlex
import time
import typing

import pytest

from functional.conftest import PATIENCE_S, Cluster, eventually
from functional.gpu_nodes import (
    HOST,
    NODE,
    SEEN,
    WATCH,
    block,
    is_fit,
    jobs,
    notice,
    refusals,
    restart_slurmd,
    show,
    states,
    step,
    submit,
    unit_on,
    until,
    until_held,
    until_registered_again,
    wait_for,
)

pytestmark = pytest.mark.timeout(1500)  # the first test of a run deploys

_LATER_S = 2  # Slurm misses a reboot within the second of the node's last answer
ONE, TWO = "1 x Mock GPU", "2 x Mock GPU"
NPS = "Mock GPU @ 0, Mock GPU @ 1"  # each next to a part of a socket, so that both need lines


def drop_leftovers(cluster: Cluster) -> None:
    """Remove leftovers of a failed test: its jobs, the file that ends them, a sick nvidia-smi."""
    cluster.on("slurmctld/0", "sh", "-c", "squeue --noheader --format=%A | xargs -r scancel")
    cluster.on(HOST, "rm", "-f", "/tmp/go-on")
    if cluster.on(HOST, "sh", "-c", f"test -e {SMI} && echo there || true"):
        nvidia_smi(cluster, FIT)
        for _ in range(2):
            check_health(cluster)
        cluster.on(HOST, "rm", SMI)


@pytest.fixture(autouse=True)
def one_card(cluster: Cluster, request: pytest.FixtureRequest) -> typing.Iterator[None]:
    """Begin and end with one card on each node; no node is refused in between."""
    assert is_fit(cluster, "gpu:mock_gpu:1"), show(cluster)
    look = (
        f"while :; do scontrol show nodes -o | grep -E 'State=[^ ]*INVAL' >>{SEEN}; sleep 0.1; done"
    )
    cluster.on(
        "slurmctld/0",
        "sh",
        "-c",
        f"rm -f {SEEN}; systemd-run --quiet --unit={WATCH} sh -c {shlex.quote(look)}",
    )
    yield
    seen = refusals(cluster)
    cluster.on("slurmctld/0", "systemctl", "stop", WATCH)
    drop_leftovers(cluster)
    if request.node.get_closest_marker("loses_cards") is None:
        assert seen == "", "Slurm refused a node"
    cluster.ok("gpus", HOST, ONE)
    cluster.ok("config", "slurm-gpu", "--reset", "shards-per-gpu,resume-when-ready")
    cluster.ok("config", "slurmctld", "slurm-conf-parameters=")
    deadline = time.monotonic() + PATIENCE_S
    # Lines go with an event, and slurmd would be refused while they go under a test's other cards.
    while not is_fit(cluster, "gpu:mock_gpu:1", within=5) or block(cluster):
        assert time.monotonic() < deadline, (show(cluster), block(cluster))
        cluster.ok("update-status")  # of both nodes' units: the other node may have lines left
        cluster.ctl("run", unit_on(cluster), "accept-gpus")


@pytest.mark.long
@pytest.mark.loses_cards
def test_a_driver_that_appears_on_a_bare_machine(cluster: Cluster):
    """The machine as upstream leaves it: no driver when it was installed, so no Gres.

    Then a driver, and a reboot.
    """
    cluster.ok("gpus", HOST, "0")
    traces = "/var/lib/slurm-gpu/cards.json /etc/systemd/system/slurmd.service.d/20-gpu.conf"
    cluster.on(HOST, "sh", "-c", f"rm {traces} && systemctl daemon-reload")
    notice(cluster)  # so that the controller forgets its lines
    cluster.set_node_config(HOST, "reset=true")
    assert is_fit(cluster, "(null)")
    until(cluster, "active: no NVIDIA GPU on this machine")
    cluster.ok("gpus", HOST, ONE)
    cluster.ok("reboot", HOST)
    assert is_fit(cluster, "gpu:mock_gpu:1"), show(cluster)
    assert (
        step(cluster, f"-w{NODE}", "--gres=gpu:mock_gpu:1", "sh", "-c", "echo $SLURM_STEP_GPUS")
        == "0"
    )


@pytest.mark.long
def test_a_reboot_that_slurm_did_not_order(cluster: Cluster):
    """Slurm marks the node down; it goes back to work by itself, and only because of this charm."""
    before = show(cluster)
    cluster.ok("config", "slurm-gpu", "resume-after-reboot=false")
    try:
        time.sleep(_LATER_S)
        cluster.ok("reboot", HOST)
        found = until_registered_again(cluster, before)
        if found["BootTime"] == before["BootTime"]:
            pytest.skip("this machine allows no time namespace, so Slurm sees no reboot of a host")
        notice(cluster)  # which must not resume it
        found = show(cluster)
        assert (states(found), found["Reason"]) == (("DOWN", set()), "Node unexpectedly rebooted")
    finally:
        cluster.ok("config", "slurm-gpu", "resume-after-reboot=true")
    until(cluster, "active: ")
    assert is_fit(cluster, "gpu:mock_gpu:1"), show(cluster)
    # An administrator's order survives a reboot.
    before = show(cluster)
    cluster.on(
        "slurmctld/0", "scontrol", "update", f"nodename={NODE}", "state=down", "reason=bad memory"
    )
    cluster.ok("reboot", HOST)
    until_registered_again(cluster, before)
    notice(cluster)
    found = show(cluster)
    assert (states(found), found["Reason"]) == (("DOWN", set()), "bad memory")
    cluster.on("slurmctld/0", "scontrol", "update", f"nodename={NODE}", "state=resume")


@pytest.mark.loses_cards
def test_a_card_is_lost_and_comes_back_while_a_job_runs(cluster: Cluster):
    job = "j" + submit(cluster, "until test -e /tmp/go-on; do sleep 0.2; done; rm /tmp/go-on")
    wait_for(cluster, **{job: "RUNNING"})
    cluster.ok("gpus", HOST, "0")
    text = "0 of 1 GPUs found, 0000:81:00.0 missing"
    until(cluster, f"blocked: bring back what is missing, or run accept-gpus: {text}")
    found = show(cluster)
    assert "DRAIN" in found["State"]
    assert found["Reason"] == f"slurm-gpu: {text}"
    cluster.ok("gpus", HOST, ONE)
    until(cluster, "active: ")
    assert is_fit(cluster, "gpu:mock_gpu:1"), show(cluster)
    wait_for(cluster, **{job: "RUNNING"})
    cluster.on(HOST, "touch", "/tmp/go-on")
    wait_for(cluster, **{job: "COMPLETED"})


@pytest.mark.long
@pytest.mark.loses_cards
def test_a_card_is_put_in_while_jobs_run_and_wait(cluster: Cluster):
    """The charm waits for the running job.

    The waiting ones run afterwards, and then one on both cards.
    """
    running = "j" + submit(
        cluster, "until test -e /tmp/go-on; do sleep 0.2; done; rm /tmp/go-on", "--gres=gpu:1"
    )
    wait_for(cluster, **{running: "RUNNING"})
    cluster.ok("gpus", HOST, TWO)
    until(cluster, f"waiting: {NODE} is drained: waiting for 1 job")
    waiting = [
        "j" + submit(cluster, 'test -n "$CUDA_VISIBLE_DEVICES"', "--gres=gpu:1") for _ in range(2)
    ]
    waiting.append("j" + submit(cluster, 'test -z "$CUDA_VISIBLE_DEVICES"'))
    wait_for(cluster, **{running: "RUNNING"} | dict.fromkeys(waiting, "PENDING"))
    cluster.on(HOST, "touch", "/tmp/go-on")
    wait_for(cluster, **{running: "COMPLETED"})
    until(
        cluster, "active: gpu:mock_gpu:2 on slurmd-0"
    )  # the node may still clean up behind the job
    assert is_fit(cluster, "gpu:mock_gpu:2"), show(cluster)
    wait_for(cluster, **dict.fromkeys(waiting, "COMPLETED"))
    both = step(cluster, f"-w{NODE}", "--gres=gpu:2", "sh", "-c", "echo $CUDA_VISIBLE_DEVICES")
    assert both == "0,1"
    assert block(cluster) == [], "slurmd finds them by itself"
    assert refusals(cluster) == ""
    cluster.ok("gpus", HOST, ONE)  # taken out for good
    until(cluster, "blocked: bring back what is missing, or run accept-gpus: 1 of 2 GPUs found")
    assert "DRAIN" in show(cluster)["State"]
    cluster.ok("run", unit_on(cluster), "accept-gpus")
    assert is_fit(cluster, "gpu:mock_gpu:1"), show(cluster)
    until(cluster, "active: gpu:mock_gpu:1 on slurmd-0")


@pytest.mark.long
@pytest.mark.loses_cards
def test_a_card_that_has_a_line_is_missing_after_a_reboot(cluster: Cluster):
    """slurmd does not start with a line for a missing device: lines follow their cards."""
    cluster.ok("gpus", HOST, NPS)
    until(cluster, "active: gpu:mock_gpu:2 on slurmd-0")
    assert is_fit(cluster, "gpu:mock_gpu:2"), show(cluster)
    both = block(
        cluster
    )  # each card is next to part of a socket: Slurm would refuse the result of AutoDetect=nvidia
    assert {(row.split()[1], "Cores=" in row) for row in both} == {("AutoDetect=off", False)}
    assert [row.partition("File=")[2].partition(" ")[0] for row in both] == [
        "/dev/nvidia0",
        "/dev/nvidia1",
    ]
    cluster.ok("gpus", HOST, "empty, Mock GPU @ 1")
    cluster.ok("reboot", HOST)
    until_held(cluster, "1 of 2 GPUs found, 0000:81:00.0 missing")
    assert block(cluster) == both[:1], "of the card that is now /dev/nvidia0"
    restart_slurmd(cluster)  # nothing keeps it from starting any more
    until_held(cluster, "1 of 2 GPUs found, 0000:81:00.0 missing")
    waiting = "j" + submit(cluster, 'test -n "$CUDA_VISIBLE_DEVICES"', "--gres=gpu:1")
    wait_for(cluster, **{waiting: "PENDING"})
    assert {unit["workload-status"]["current"] for unit in cluster.units().values()} <= {
        "active",
        "blocked",
    }
    # The card is back.
    cluster.ok("gpus", HOST, NPS)
    cluster.ok("reboot", HOST)
    until(cluster, "active: gpu:mock_gpu:2 on slurmd-0")
    assert is_fit(cluster, "gpu:mock_gpu:2"), show(cluster)
    assert block(cluster) == both
    wait_for(cluster, **{waiting: "COMPLETED"})
    job = (f"-w{NODE}", "--gres=gpu:2", "sh", "-c", "echo $CUDA_VISIBLE_DEVICES")
    assert step(cluster, *job) == "0,1"
    # It goes for good: the node works with the other one, whose line slurmd takes at each start.
    cluster.ok("gpus", HOST, "empty, Mock GPU @ 1")
    until_held(cluster, "1 of 2 GPUs found, 0000:81:00.0 missing")
    cluster.ok("run", unit_on(cluster), "accept-gpus")
    until(cluster, "active: gpu:mock_gpu:1 on slurmd-0")
    restart_slurmd(cluster)
    assert is_fit(cluster, "gpu:mock_gpu:1"), show(cluster)
    assert block(cluster) == both[:1]
    assert (
        step(cluster, f"-w{NODE}", "--gres=gpu:1", "sh", "-c", "echo $CUDA_VISIBLE_DEVICES") == "0"
    )


@pytest.mark.parametrize(
    ("asked", "error"),
    [("", "Operation not permitted"), ("--gres=gpu:1", "No such device or address")],
)
def test_a_card_that_was_not_asked_for_cannot_be_opened(cluster: Cluster, asked: str, error: str):
    """The mock's device node has no driver: an open that cgroups allow ends with ENXIO."""
    script = f"cd /tmp && srun {asked} head -c1 /dev/nvidia0"
    answer = cluster.exec("sackd/0", "runuser", "-u", "ubuntu", "--", "sh", "-c", script)
    assert answer.code != 0
    assert error in answer.err


def controller_log(cluster: Cluster, begin: str) -> str:
    """Return the log of slurmctld from this time on."""
    journal = ("journalctl", "-u", "slurmctld", "-o", "cat", "--no-pager")
    return cluster.on("slurmctld/0", *journal, f"--since=@{begin}")


@pytest.mark.long
def test_cards_are_shared_by_option_until_it_is_reset(cluster: Cluster):
    cluster.ok("config", "slurm-gpu", "shards-per-gpu=4", "resume-when-ready=true")
    output = until(cluster, "blocked: shards-per-gpu: ")
    assert "set GresTypes=gpu,shard in slurm.conf (docs/howto/gpus.md)" in output
    assert is_fit(cluster, "gpu:mock_gpu:1"), "nothing is touched before Slurm knows shards"
    cluster.ok("config", "slurmctld", "slurm-conf-parameters=GresTypes=gpu,shard")
    cluster.ok("update-status")
    until(cluster, "active: gpu:mock_gpu:1,shard:4 on slurmd-0")
    assert is_fit(cluster, "gpu:mock_gpu:1,shard:mock_gpu:4"), show(cluster)
    assert f"NodeName={NODE} AutoDetect=off Name=shard Count=4 File=/dev/nvidia0" in block(cluster)
    # slurmctld sends the login node a change once, and two in a moment may cross: doctor's remedy for a stale slurm.conf.
    cluster.on("sackd/0", "systemctl", "restart", "sackd")
    job = (f"-w{NODE}", "--gres=shard:2", "sh", "-c", "echo $CUDA_VISIBLE_DEVICES")
    assert step(cluster, *job) == "0"
    # The way back, several options in one command, while slurm.conf still has the line.
    begin = cluster.on("slurmctld/0", "date", "+%s.%N")
    cluster.ok("config", "slurm-gpu", "--reset", "shards-per-gpu,resume-when-ready")
    until(cluster, f"waiting: {NODE} is drained: waiting for Slurm to forget job")
    assert '"resume_when_ready": false' in cluster.on(HOST, "cat", "/var/lib/slurm-gpu/node.json")
    # 24.11.5 would crash here, over the job, if its node had no shards now.
    cluster.on("slurmctld/0", "systemctl", "restart", "slurmctld")
    until(cluster, f"waiting: {NODE} is drained: waiting for Slurm to forget job")
    assert "shard:mock_gpu:4" in show(cluster)["Gres"]
    # While the line is there slurmctld logs at each start that GresTypes is set twice, and takes the last one: upstream's
    # slurm.conf has GresTypes=gpu itself.
    repeated = "GresTypes 1 specified more than once"
    log = controller_log(cluster, begin)
    assert repeated in log and not re.search("reconfigure failed|core-dump", log), log
    begin = cluster.on("slurmctld/0", "date", "+%s.%N")
    cluster.ok("config", "slurmctld", "--reset", "slurm-conf-parameters")
    until(cluster, "active: gpu:mock_gpu:1 on slurmd-0")
    until(cluster, "active: no node needs lines in gres.conf", "slurm-gpu-controller/0")
    assert is_fit(cluster, "gpu:mock_gpu:1"), show(cluster)
    assert (
        cluster.on("slurmctld/0", "sh", "-c", "scontrol show config | grep GresTypes").split()[-1]
        == "gpu"
    )
    log = controller_log(cluster, begin)
    assert repeated not in log and not re.search("reconfigure failed|core-dump", log), log


@pytest.mark.long
def test_the_charm_is_removed_from_a_node_that_needs_lines(cluster: Cluster):
    """A free node goes on without GPUs, and slurmd starts without the lines."""
    kept = "find /var/lib/slurm-gpu -type f; ls /etc/systemd/system/*/20-gpu.conf || true"
    cluster.ok("gpus", HOST, NPS)
    until(cluster, "active: gpu:mock_gpu:2 on slurmd-0")
    lines = block(cluster)
    assert len(lines) == 2
    cluster.ok("remove-relation", "slurm-gpu:compute", "slurmd:juju-info")
    assert is_fit(cluster, "(null)"), show(cluster)
    assert is_fit(cluster, "gpu:mock_gpu:1", "slurmd-1"), (
        "slurmd finds GPUs that need no line by itself"
    )
    for _ in range(4):  # the end of a unit may reach the controller some hooks later
        cluster.ok("update-status", "--once", "slurm-gpu-controller/0")
    assert block(cluster) == []
    restart_slurmd(cluster)
    assert is_fit(cluster, "(null)"), show(cluster)
    assert step(cluster, f"-w{NODE}", "true") == ""
    assert "gres=" not in cluster.on(HOST, "cat", "/etc/default/slurmd")
    assert cluster.on(HOST, "sh", "-c", kept) == ""
    cluster.ok("integrate", "slurm-gpu:compute", "slurmd:juju-info")
    unit_on.cache_clear()  # a unit that comes back has another number
    until(cluster, "active: gpu:mock_gpu:2 on slurmd-0")
    assert is_fit(cluster, "gpu:mock_gpu:2"), show(cluster)


@pytest.mark.long
def test_a_restart_while_slurmd_reconfigures(cluster: Cluster):
    """The process that slurmd hands over to stays, with the port. The next start must work."""
    job = "j" + submit(
        cluster, "until test -e /tmp/go-on; do sleep 0.2; done; rm /tmp/go-on", "--gres=gpu:1"
    )
    wait_for(cluster, **{job: "RUNNING"})
    hangup = "systemctl reset-failed slurmd; kill -HUP $(systemctl show -P MainPID slurmd); systemctl restart slurmd"
    journal = ("journalctl", "-u", "slurmd", "-o", "cat", "--no-pager")
    ended = "of the former start holds the port: sending SIGTERM"
    begin, lines = cluster.on(HOST, "date", "+%s.%N"), ""
    for _ in range(
        24
    ):  # one in two or three leaves a process, and of these a few end by themselves first
        cluster.on(
            HOST, "sh", "-c", hangup
        )  # what slurmctld sends at `scontrol reconfigure` ends in this signal
        if ended in (lines := cluster.on(HOST, *journal, f"--since=@{begin}")):
            break
    else:
        pytest.fail(f"no process that stayed behind was ended:\n{lines}")
    main = cluster.on(HOST, "systemctl", "show", "-P", "MainPID", "slurmd")
    assert (
        cluster.on(HOST, "systemctl", "is-active", "slurmd"),
        cluster.on(HOST, "pgrep", "-x", "slurmd"),
    ) == ("active", main)
    assert is_fit(cluster, "gpu:mock_gpu:1"), show(cluster)
    wait_for(cluster, **{job: "RUNNING"})
    cluster.on(HOST, "touch", "/tmp/go-on")
    wait_for(cluster, **{job: "COMPLETED"})


SMI = "/usr/bin/nvidia-smi"
SICK = "echo 'Unable to determine the device handle for GPU: GPU is lost' >&2; exit 15"
FIT = """echo '<nvidia_smi_log><attached_gpus>1</attached_gpus><gpu id="00000000:01:00.0"></gpu></nvidia_smi_log>'"""


def nvidia_smi(cluster: Cluster, script: str) -> None:
    """Put a program in nvidia-smi's place that says this of the cards."""
    write = 'printf "#!/bin/sh\\n%s\\n" "$1" >"$2"; chmod 755 "$2"'
    cluster.on(HOST, "sh", "-c", write, "-", script, SMI)


def check_health(cluster: Cluster) -> None:
    """Let the timer's check run now."""
    cluster.exec(HOST, "systemctl", "start", "gpu-health.service")


def service_log(cluster: Cluster) -> str:
    return cluster.on(
        HOST, "journalctl", "-b", "-o", "cat", "--no-pager", "-u", "slurm-gpu-node.service"
    )


@pytest.mark.long
def test_a_node_with_a_broken_card_stays_held_when_upstream_sets_it_idle(cluster: Cluster):
    """What upstream's slurmd does after it restarted its daemon: `state=idle`.

    A waiting job must not start on the card.
    """
    nvidia_smi(cluster, SICK)
    notice(cluster)
    check_health(cluster)
    found = show(cluster)
    assert states(found) == ("IDLE", {"DRAIN"})
    assert found["Reason"].startswith("gpu-health: nvidia-smi exited 15")
    job = submit(cluster, "true")
    for _ in range(3):
        cluster.on(
            HOST,
            "sh",
            "-c",
            f"systemctl restart slurmd && scontrol update nodename={NODE} state=idle",
        )
        deadline = time.monotonic() + 30
        while "DRAIN" not in states(show(cluster))[1]:
            assert jobs(cluster)[job] == "PENDING"
            assert time.monotonic() < deadline, service_log(cluster)
            time.sleep(0.5)
    assert jobs(cluster)[job] == "PENDING"
    assert show(cluster)["Reason"].startswith("gpu-health: nvidia-smi exited 15")
    assert "is drained again: gpu-health: " in service_log(cluster)
    nvidia_smi(cluster, FIT)
    for _ in range(2):
        check_health(cluster)
    wait_for(cluster, **{f"j{job}": "COMPLETED"})
    assert is_fit(cluster, "gpu:mock_gpu:1")
    assert "No reservations" in cluster.on("slurmctld/0", "scontrol", "show", "reservations")
    cluster.on(HOST, "rm", SMI)
    notice(cluster)


@pytest.mark.long
def test_a_rebooted_node_takes_jobs_without_a_hook(cluster: Cluster):
    """The machine reboots without Juju.

    No hook runs: the keeper and the node's service do it all.
    """
    before = show(cluster)
    boot = cluster.on(HOST, "cat", "/proc/sys/kernel/random/boot_id")
    time.sleep(_LATER_S)
    cluster.ctl("exec", HOST, "--", "systemctl", "reboot")

    def is_rebooted() -> None:
        answer = cluster.ctl("exec", HOST, "--", "cat", "/proc/sys/kernel/random/boot_id")
        assert answer.code == 0 and answer.out.strip() not in {"", boot}, answer

    eventually(is_rebooted)
    until_registered_again(cluster, before)
    assert is_fit(cluster, "gpu:mock_gpu:1"), service_log(cluster)
    assert f"{NODE} takes jobs again: it was rebooted, and all checks passed" in service_log(
        cluster
    )
