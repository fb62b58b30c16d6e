"""Slurm's partitions and jobs: captured output, and every kind of refusal."""

import pytest
from slurm_commands import ASKED, Commands, node, partition

from ddp.slurm import jobs, partition_list, submissions
from slurm_ddp.commands import CommandError, CommandTimeout
from slurm_ddp.slurm import times

# Captured from 24.11.5.
QUEUE = """12|ddp|CANCELLED|0:0|1|1|slurmd|0:00|UNLIMITED|2026-11-20T18:48:45|2026-11-20T18:48:45|4294901757|BeginTime||12|N/A|x|
13|ddp|FAILED|3:0|0|1|slurmd|0:00|365-00:00:00|2026-11-20T18:49:31|2026-11-20T18:49:31|4294901757|NonZeroExitCode|slurmd-0|13|N/A|sbatch|
14|ddp|FAILED|0:9|0|1|slurmd|0:00|365-00:00:00|2026-11-20T18:49:31|2026-11-20T18:49:31|4294901757|JobLaunchFailure|slurmd-0|14|N/A|sbatch|
15|ddp|FAILED|15:53|0|1|slurmd|0:00|365-00:00:00|2026-11-20T18:49:31|2026-11-20T18:49:31|4294901757|JobLaunchFailure|slurmd-1|15|N/A|sbatch|
16|ddp|RUNNING|0:0|0|2|slurmd|0:01|UNLIMITED|2026-11-20T18:55:37|2026-11-20T18:55:37|4294901757|None|slurmd-[0-1]|16|N/A|a-name-longer-than-any-column|
"""


def partitions(
    commands: Commands, partition_text: str, node_text: str
) -> tuple[partition_list.Partition, ...]:
    commands.expect("/usr/bin/scontrol", "-a", "show", "partition", "-o", stdout=partition_text)
    commands.expect("/usr/bin/scontrol", "-a", "show", "nodes", "-o", stdout=node_text)
    commands.expect("/usr/bin/scontrol", "show", "config", stdout="MaxArraySize = 1001\n")
    return partition_list.partitions()


@pytest.mark.parametrize(
    ("state", "usable"),
    [
        ("IDLE", True),
        ("MIXED", True),
        ("IDLE+DYNAMIC_NORM", True),
        ("IDLE+CLOUD+POWERED_DOWN", True),
        ("MIXED+CLOUD+NOT_RESPONDING+POWERING_UP", True),
        ("IDLE+CLOUD+NOT_RESPONDING+POWERING_DOWN", False),
        ("ALLOCATED+COMPLETING", True),
        ("DOWN", False),
        ("IDLE*", False),
        ("IDLE+DRAIN", False),
        ("IDLE+FAIL", False),
        ("IDLE+MAINTENANCE", False),
        ("UNKNOWN", False),
        ("IDLE+REBOOT_ISSUED", False),
    ],
)
def test_which_nodes_take_jobs(commands: Commands, state: str, usable: bool):
    (found,) = partitions(commands, partition(), node(state=state))
    assert found.nodes[0].is_usable is usable
    assert len(found.usable) == usable


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("30", 1800),
        ("1:30", 90),
        ("1:00:00", 3600),
        ("1-0", 86400),
        ("1-12:30", 131400),
        ("2-00:00:10", 172810),
        ("UNLIMITED", None),
        ("", None),
        ("1:2:3:4", None),
        ("-1", None),
        ("1-", None),
        ("9999999", None),
    ],
)
def test_times(text: str, seconds: int | None):
    assert times.parse_time(text) == seconds


@pytest.mark.parametrize("seconds", [60, 3599, 3600, 86399, 86400, 172810])
def test_a_time_is_understood_as_it_is_written(seconds: int):
    assert times.parse_time(times.format_time(seconds)) == seconds


def test_the_jobs_of_an_account(commands: Commands):
    commands.expect(
        "/usr/bin/squeue", "-h", "-a", "-t", "all", "-u", "ddp", "-O", ASKED, stdout=QUEUE
    )
    found = jobs.jobs(user="ddp")
    assert [(job.job_id, job.state, job.exit_code) for job in found] == [
        (16, "RUNNING", 0),
        (15, "FAILED", 15),
        (14, "FAILED", 137),
        (13, "FAILED", 3),
        (12, "CANCELLED", 0),
    ]
    assert found[0] == jobs.Job(
        16,
        "ddp",
        "RUNNING",
        0,
        0,
        2,
        "slurmd",
        "0:01",
        "UNLIMITED",
        "2026-11-20T18:55:37Z",
        "None",
        "slurmd-[0-1]",
        "a-name-longer-than-any-column",
    )
    assert [job.is_active for job in found] == [True, False, False, False, False]
    assert found[-1].restarts == 1


def test_a_name_can_imitate_nothing(commands: Commands):
    evil = (
        "17|ddp|RUNNING|0:0|0|1|p|0:01|1|a|b|9|None|n|17|N/A|x|y\n18|eve|RUNNING|0:0|0|1|p|0:01|1|a|b|9|None|n|18|N/A|z|\n"
        "not a job|\n|||||||||||||||\n"
    )
    commands.expect(
        "/usr/bin/squeue",
        "-h",
        "-a",
        "-t",
        "all",
        "-u",
        "ddp",
        "-n",
        "run",
        "-O",
        ASKED,
        stdout=evil,
    )
    found = jobs.jobs(user="ddp", name="run")
    assert [(job.job_id, job.name) for job in found] == [(17, "x|y")]


def ask_for(commands: Commands, job_id: int, **answer: object) -> None:
    argv = ("/usr/bin/squeue", "-h", "-a", "-t", "all", "-j", str(job_id), "-O", ASKED)
    commands.expect(*argv, **answer)  # pyright: ignore[reportArgumentType]


def test_another_users_job_is_none_of_ours(commands: Commands):
    ask_for(commands, 13, stdout=QUEUE.splitlines(keepends=True)[1])
    assert jobs.job(13, user="eve") is None


def test_another_error_is_not_taken_for_a_forgotten_job(commands: Commands):
    ask_for(commands, 9, returncode=1, stderr="slurm_load_jobs error: Access/permission denied\n")
    with pytest.raises(jobs.SlurmError, match=r"^Access/permission denied$"):
        jobs.job(9, user="ddp")


@pytest.mark.parametrize(
    "message",
    [
        "slurm_load_jobs error: Unable to contact slurm controller (connect failure)\n",
        "squeue: error: resolve_ctls_from_dns_srv: res_nsearch error: Unknown host\nsqueue: error: fetch_config: DNS SRV lookup failed\n"
        "squeue: fatal: Could not establish a configuration source\n",
        "slurm_load_jobs error: Socket timed out on send/recv operation\n",
        "slurm_load_jobs error: Zero Bytes were transmitted or received\n",
    ],
)
def test_a_controller_that_is_away_may_come_back(commands: Commands, message: str):
    ask_for(commands, 9, returncode=1, stderr=message)
    with pytest.raises(jobs.NotAnsweringError):
        jobs.job(9, user="ddp")


def test_a_command_that_hangs_or_is_missing_may_come_back(commands: Commands):
    argv = ("/usr/bin/squeue", "-h", "-a", "-t", "all", "-j", "9", "-O", ASKED)
    commands.fail(*argv, error=CommandTimeout("squeue: no answer within 60 s"))
    with pytest.raises(jobs.NotAnsweringError, match=r"^Slurm: squeue: no answer within 60 s$"):
        jobs.job(9, user="ddp")
    commands.fail(*argv, error=CommandError("squeue: No such file or directory"))
    with pytest.raises(
        jobs.NotAnsweringError,
        match=r"^Slurm's client is not installed: squeue: No such file or directory$",
    ):
        jobs.job(9, user="ddp")


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (
            "allocation failure: Requested node configuration is not available\n",
            "allocation failure: Requested node configuration is not available",
        ),
        (
            "sbatch: error: invalid partition specified: nope\nallocation failure: Invalid partition name specified\n",
            "invalid partition specified: nope; allocation failure: Invalid partition name specified",
        ),
        ("sbatch: error: x\nsbatch: error: x\n", "x"),
        ("", "/usr/bin/sbatch exited 1"),
    ],
)
def test_a_refusal_is_one_line_in_slurms_words(commands: Commands, message: str, words: str):
    commands.expect("/usr/bin/sbatch", "--test-only", stderr=message, returncode=1)
    with pytest.raises(jobs.SlurmError) as caught:
        submissions.judge("#!/bin/bash\n")
    assert str(caught.value) == words
    assert not isinstance(caught.value, jobs.NotAnsweringError)


def test_cancelling(commands: Commands):
    commands.expect("/usr/bin/scancel", "12")
    jobs.cancel(12)
    commands.expect("/usr/bin/scancel", "13", "40_3")
    jobs.cancel(13, "40_3")
    commands.expect(
        "/usr/bin/scancel",
        "12",
        returncode=1,
        stderr="scancel: error: Kill job error on job id 12: Access/permission denied\n",
    )
    with pytest.raises(
        jobs.SlurmError, match=r"^Kill job error on job id 12: Access/permission denied$"
    ):
        jobs.cancel(12)


@pytest.mark.parametrize(
    ("tasks", "held", "not_held"),
    [
        ("2-7%2", (2, 7), (1, 8)),
        ("0,2,4-9:2,12-15%4", (0, 2, 8, 15), (1, 5, 9, 16)),
        ("5", (5,), (4,)),
        ("1,3,5,...", (3, 99), ()),
        ("N/A", (), (0,)),
    ],
)
def test_tasks_that_wait_together(tasks: str, held: tuple[int, ...], not_held: tuple[int, ...]):
    assert all(jobs.holds_task(tasks, number) for number in held)
    assert not any(jobs.holds_task(tasks, number) for number in not_held)


def test_a_waiting_job_is_let_go_as_its_owner(commands: Commands):
    commands.expect("/usr/bin/scontrol", "update", "JobId=12", "StartTime=now")
    commands.expect("/usr/bin/scontrol", "release", "12")
    jobs.start_now(12)
    jobs.release(12)


def test_the_controller_is_there(commands: Commands):
    commands.expect("/usr/bin/scontrol", "ping", stdout="Slurmctld(primary) at ctl is UP\n")
    jobs.ping()
    commands.expect(
        "/usr/bin/scontrol",
        "ping",
        stdout="Slurmctld(primary) at a is DOWN\nSlurmctld(backup) at b is UP\n",
    )
    jobs.ping()
    commands.expect(
        "/usr/bin/scontrol", "ping", stdout="Slurmctld(primary) at ctl is DOWN\n", returncode=1
    )
    with pytest.raises(jobs.NotAnsweringError, match=r"^Slurmctld\(primary\) at ctl is DOWN$"):
        jobs.ping()
    commands.fail(
        "/usr/bin/scontrol", "ping", error=CommandTimeout("scontrol: no answer within 10 s")
    )
    with pytest.raises(jobs.NotAnsweringError, match=r"^Slurm: scontrol: no answer within 10 s$"):
        jobs.ping()
