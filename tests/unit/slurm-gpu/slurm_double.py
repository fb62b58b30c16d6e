"""A double of Slurm that answers scontrol, squeue and systemctl as 24.11.5 and 25.11.7 do.

It fails on any other command. Its rules, each observed on real daemons: a restarted slurmd whose
node record exists registers with the old Gres; `delete` is refused while jobs or an active
reservation hold the node, and ends a future reservation; a re-registered node comes up IDLE, or
IDLE+DRAIN when `--conf` says `state=drain`; fewer devices than Gres make the node INVALID_REG and
drain it with Slurm's reason, which replaces any other, and the reported Gres is shown instead of
the record's; when the devices are back the next registration clears INVALID_REG but neither drain
nor reason; a waiting job starts as soon as a node may take it; drain and fail replace each other;
marking a node down ends its jobs; a node that was rebooted without Slurm's order is down as soon as
it registers (ReturnToService=0), unless it was drained.
"""

import dataclasses
import pathlib
import re
import shlex
import time

from slurm_ddp.commands import CommandError, Completed

SHORT_OF_GPUS = "gres/gpu count reported lower than configured ({found} < {wanted})"


class Killed(BaseException):
    """The hook's process ends here, as when the machine loses power."""


@dataclasses.dataclass
class Record:
    """The controller's record of the node."""

    gres: str
    base: str = "IDLE"
    flags: set[str] = dataclasses.field(default_factory=lambda: {"DYNAMIC_NORM"})
    reason: str = ""
    author: str = "root@2026-11-20T18:51:55"


def checked(program: object, answer: Completed) -> Completed:
    """Return the answer, or raise what `slurm_ddp.commands` does for a command that failed."""
    if answer.returncode:
        text = f"{program} exited {answer.returncode}: {answer.stderr.strip() or answer.stdout.strip()}"
        raise CommandError(
            text, returncode=answer.returncode, stdout=answer.stdout, stderr=answer.stderr
        )
    return answer


class SlurmDouble:
    """One controller, one node called slurmd-0."""

    name = "slurmd-0"

    def __init__(self, options: pathlib.Path, held: pathlib.Path) -> None:
        self.options = options
        self.held = held
        self.record: Record | None = None
        self.devices = 1  # what slurmd finds for its Gres
        self.slurmd_active = True
        self.slurmctld_active = True
        self.answering = True
        self.registers = True  # False: slurmd runs but never reaches the controller
        self.jobs: list[str] = []
        self.remembered: list[str] = []  # what squeue shows of each job, with finished ones
        self.reservations: list[str] = []  # of this and another node, active
        self.to_come: list[str] = []  # reservations that begin later
        self.maintained: list[str] = []  # reservations for maintenance of this node
        self.slurmd_since = 0.0  # when systemd saw slurmd start, on CLOCK_MONOTONIC
        self.waiting: list[str] = []
        self.ended: list[str] = []  # jobs that an order ended
        self.log: list[str] = []  # orders that change something
        self.lives: int | None = None  # the number of commands after which the hook is killed
        self.reconfigured = 0
        self.boot_time = "None"  # as slurmd reported when it registered last
        self.booted = "None"  # as it will say
        self.started = "None"  # slurmd, by its own report
        self.types = "gpu"
        self.printed: str | None = None  # what `slurmd -G` prints instead of the right lines
        self.made_with = ""  # the Gres of the record, when it is no longer shown

    def run(
        self, *argv: str | pathlib.Path, timeout: float = 60, check: bool = True, **_: object
    ) -> Completed:
        assert timeout > 0
        if self.lives is not None:
            if self.lives == 0:
                self.lives = None
                raise Killed
            self.lives -= 1
        answer = self._answer(shlex.join(str(word) for word in argv))
        return checked(argv[0], answer) if check else answer

    def register(self) -> None:
        """slurmd starts and tells the controller about the node."""
        text = self.held.read_text() if self.held.exists() else self.options.read_text()
        words = shlex.split(text.partition("=")[2])
        pairs = (word.partition("=") for word in words[words.index("--conf") + 1].split())
        settings = {key: value for key, _, value in pairs}
        if self.record is None:
            self.record, self.made_with = Record(settings.get("gres", "")), ""
            self.boot_time = "None"  # a new record knows of no earlier boot
            if settings.get("state") == "drain":
                self.record.flags.add("DRAIN")
        made_with = self.made_with or self.record.gres
        wanted = _count_gpus(made_with)
        found = min(
            self.devices, _count_gpus(settings.get("gres", ""))
        )  # slurmd reports none that --conf lacks
        if found < wanted:
            self.made_with, self.record.gres = (
                made_with,
                made_with.replace(f":{wanted}", f":{found}"),
            )
            if "INVALID_REG" not in self.record.flags:
                self.record.reason = SHORT_OF_GPUS.format(found=found, wanted=wanted)
            self.record.flags |= {"INVALID_REG", "DRAIN"}
        else:
            self.record.flags.discard("INVALID_REG")
            self.record.gres = made_with
        if self.boot_time not in {"None", self.booted} and not self.record.flags & {"DRAIN"}:
            self.set_down(
                self.record.reason or "Node unexpectedly rebooted"
            )  # a reason that is there stays
        self.boot_time = self.booted
        self.schedule()

    def reboot(self) -> None:
        """The machine reboots, and slurmd registers before any hook runs."""
        self.booted = "2026-11-22T03:00:00" if self.booted == "None" else f"{self.booted}0"
        self.boot_time = self.boot_time if self.boot_time != "None" else "before"
        if self.jobs and self.record is not None:
            self.ended += self.jobs
            self.jobs = []
        self.register()

    def set_down(self, reason: str, author: str = "slurm@2026-11-20T21:55:49") -> None:
        """Mark the node down, as the controller or another party does."""
        assert self.record is not None
        self.record.base, self.record.reason, self.record.author = "DOWN", reason, author
        self.ended += self.jobs
        self.jobs = []

    def schedule(self) -> None:
        """Start waiting jobs if possible."""
        record = self.record
        is_kept = (
            record is None
            or record.base != "IDLE"
            or record.flags & {"DRAIN", "FAIL", "INVALID_REG"}
        )
        if not is_kept and not self.maintained:
            self.jobs += self.waiting
            self.waiting = []

    def end_jobs(self) -> None:
        """The jobs of the node come to their own end."""
        self.jobs = []
        self.schedule()

    def state(self) -> str:
        """The node's state as the controller would print it."""
        assert self.record is not None
        base = "MIXED" if self.jobs and self.record.base == "IDLE" else self.record.base
        flags = self.record.flags | ({"RESERVED"} if self.reservations else set())
        flags |= {"MAINTENANCE", "RESERVED"} if self.maintained else set()
        return "+".join([base, *sorted(flags)])

    def _answer(self, command: str) -> Completed:
        if command.startswith("/usr/sbin/slurmd -G -f "):
            return Completed(0, "", self._print_gres(pathlib.Path(command.rpartition(" ")[2])))
        if command.startswith("/usr/bin/systemctl "):
            return self._systemctl(command.removeprefix("/usr/bin/systemctl "))
        if not self.answering:
            return Completed(
                1, "", "slurm_x error: Unable to contact slurm controller (connect failure)\n"
            )
        if command == f"/usr/bin/squeue --noheader --nodelist {self.name} --format %i":
            return Completed(0, "".join(f"{job}\n" for job in self.jobs), "")
        if command.startswith(
            f"/usr/bin/squeue --noheader --states all --nodelist {self.name} --Format jobarrayid:"
        ):
            return Completed(0, "\n".join(self.remembered), "")
        if command == "/usr/bin/scontrol show config":
            return Completed(0, f"GresTypes               = {self.types}\n", "")
        if command == f"/usr/bin/scontrol show node {self.name} -o":
            return self._show()
        if command.startswith("/usr/bin/scontrol show node "):
            return Completed(1, f"Node {command.split()[3]} not found\n", "")
        if re.match(r"/usr/bin/scontrol show (reservations|hostnames|hostlist) ", command):
            return self._reservations(command)
        if command == "/usr/bin/scontrol -a show nodes -o":
            return self._show() if self.record else Completed(0, "No nodes in the system\n", "")
        if command == "/usr/bin/scontrol ping":
            return Completed(
                0, "Slurmctld(primary) at a is DOWN\nSlurmctld(backup) at b is UP\n", ""
            )
        self.log.append(command)
        if command == "/usr/bin/scontrol reconfigure":
            self.reconfigured += 1
            return Completed(0, "", "")
        if command == f"/usr/bin/scontrol delete nodename={self.name}":
            return self._delete()
        if "reservation" in command:
            return self._maintain(command.removeprefix("/usr/bin/scontrol "))
        words = shlex.split(command)
        orders = dict(word.split("=", 1) for word in words[2:])
        is_update = words[:3] == ["/usr/bin/scontrol", "update", f"nodename={self.name}"]
        assert is_update and set(orders) <= {"nodename", "state", "reason"}, (
            f"nobody expected {command}"
        )
        return self.update(orders["state"], orders.get("reason", ""))

    def _reservations(self, command: str) -> Completed:
        row = "ReservationName={} StartTime=x Nodes={} State={}\n"
        rows = [row.format(name, "slurmd-[0-1]", "ACTIVE") for name in self.reservations]
        rows += [row.format(name, "slurmd-0", "INACTIVE") for name in self.to_come]
        rows += [row.format(name, "slurmd-0", "ACTIVE") for name in self.maintained]
        message = {
            "show reservations -o": "".join(rows) or "No reservations in the system\n",
            "show hostnames 'slurmd-[0-1]'": "slurmd-0\nslurmd-1\n",
            "show hostnames slurmd-0": "slurmd-0\n",
            "show hostlist slurmd-1": "slurmd-1",
        }
        return Completed(0, message[command.removeprefix("/usr/bin/scontrol ")], "")

    def _maintain(self, command: str) -> Completed:
        """A reservation for maintenance, as 24.11.5 was seen to answer."""
        match = re.fullmatch(
            r"create reservation reservationname=(\S+) nodes=(\S+) users=root starttime=now endtime=now\+\d+ "
            r"flags=maint,ignore_jobs",
            command,
        )
        if match is not None:
            if match[2] != self.name or self.record is None:
                return Completed(
                    1, "", "Error creating the reservation: Invalid node name specified\n"
                )
            if match[1] in self.maintained:
                return Completed(
                    1, "", "Error creating the reservation: Duplicate reservation name\n"
                )
            self.maintained.append(match[1])
            return Completed(0, f"Reservation created: {match[1]}\n", "")
        match = re.fullmatch(
            r"(update|delete) reservationname=(\S+)(?: endtime=now\+\d+)?", command
        )
        assert match is not None, f"nobody expected scontrol {command}"
        if match[2] not in self.maintained:
            return Completed(1, "", f"{match[1]}_reservation: Requested reservation is invalid\n")
        if match[1] == "delete":
            self.maintained.remove(match[2])
            self.schedule()
        return Completed(0, "", "")

    def upstream_sets_idle(self) -> Completed:
        """Restart slurmd and set its node's state as upstream (slurmd/src/charm.py:208-215)."""
        self.register()
        self.slurmd_since = time.clock_gettime(time.CLOCK_MONOTONIC)
        return self.update("idle", "")

    def _print_gres(self, conf: pathlib.Path) -> str:
        """Print as `slurmd -G`: this node's lines.

        Nothing with detection alone, which means agreement.
        """
        if self.printed is not None:
            return self.printed
        rows = (conf.parent / "gres.conf").read_text().splitlines()
        prefix = f"NodeName={self.name} "
        lines = [
            dict(word.split("=", 1) for word in row.split())
            for row in rows
            if row.startswith(prefix)
        ]
        if not lines and rows[0] != "AutoDetect=off":
            return ""
        text, types = "", dict[str, str]()
        for i, line in enumerate(lines):
            files = line.get("File", line.get("MultipleFiles", ""))
            kind = types.setdefault(
                files, line.get("Type", "")
            )  # shares have their card's, whose line comes first
            head = f"slurmd-{self.name}: Gres Name={line['Name']} Type={kind} Count={line.get('Count', '1')} Index={i}"
            cores = f" Cores={line['Cores']}" if "Cores" in line else ""
            text += "".join(
                f"{head} ID=7696487 File={file}{cores} CoreCnt=2\n" for file in files.split(",")
            )
        return text or "slurmd: warning: Ignoring file-less GPU gpu from final GRES list\n"

    def _systemctl(self, command: str) -> Completed:
        if command == "is-active --quiet slurmd.service":
            return Completed(0 if self.slurmd_active else 3, "", "")
        if command == "is-active --quiet slurmctld.service":
            return Completed(0 if self.slurmctld_active else 3, "", "")
        if command == "show -P ActiveEnterTimestampMonotonic slurmd.service":
            return Completed(0, f"{int(self.slurmd_since * 1e6)}\n", "")
        if command.rsplit(maxsplit=1)[-1] in {"slurm-gpu-node.service", "slurm-gpu-node.path"}:
            return Completed(0, "", "")
        self.log.append(command)
        if command == "restart slurmd.service":
            self.slurmd_active = True
            self.slurmd_since = time.clock_gettime(time.CLOCK_MONOTONIC)
            if self.registers and self.answering:
                self.register()
            return Completed(0, "", "")
        assert command == "daemon-reload", f"nobody expected systemctl {command}"
        return Completed(0, "", "")

    def _show(self) -> Completed:
        if self.record is None:
            return Completed(1, f"Node {self.name} not found\n", "")
        tres = "cpu=1,mem=100M" if self.jobs else ""
        text = (
            f"NodeName={self.name} Arch=x86_64 CoresPerSocket=2  CPUAlloc={len(self.jobs)} CPUEfctv=2 CPUTot=2 CPULoad=1.1 "
            f"AvailableFeatures=slurmd ActiveFeatures=slurmd Gres={self.record.gres or '(null)'} NodeAddr=10.0.0.1 "
            f"NodeHostName={self.name} Version=24.11.5 OS=Linux 6.1.0 #1 SMP  RealMemory=4000 AllocMem=0 FreeMem=22793 "
            f"Sockets=1 Boards=1 State={self.state()} ThreadsPerCore=1 TmpDisk=0 Weight=1 Owner=N/A MCS_label=N/A "
            f"Partitions=slurmd  BootTime={self.boot_time} SlurmdStartTime={self.started} LastBusyTime=None CfgTRES=cpu=2 AllocTRES={tres}"
        )
        reason = (
            f" Reason={self.record.reason} [{self.record.author}]" if self.record.reason else ""
        )
        return Completed(0, f"{text}{reason}\n", "")

    def _delete(self) -> Completed:
        if self.record is None:
            return Completed(
                1, "", f"delete_node nodename={self.name}: Invalid node name specified\n"
            )
        if self.jobs or self.reservations or self.maintained:
            return Completed(1, "", f"delete_node nodename={self.name}: Requested nodes are busy\n")
        self.record = None
        self.to_come = []  # with no output
        return Completed(0, "", "")

    def update(self, state: str, reason: str) -> Completed:
        if self.record is None:
            return Completed(1, "", "slurm_update error: Invalid node name specified\n")
        record = self.record
        if state in {"drain", "down", "fail"}:
            assert reason, (
                "You must specify a reason when DOWNING or DRAINING a node. Request denied"
            )
            record.reason = reason
        if state == "drain":
            record.flags = (record.flags - {"FAIL"}) | {"DRAIN"}
        elif state == "fail":
            record.flags = (record.flags - {"DRAIN"}) | {"FAIL"}
        elif state == "down":
            record.base = "DOWN"
            self.ended += self.jobs
            self.jobs = []
        elif state == "undrain":
            record.flags -= {"DRAIN", "FAIL"}
        elif state == "idle" and self.jobs:
            return Completed(1, "", "slurm_update error: Invalid node state specified\n")
        else:
            assert state in {"idle", "resume"}
            record.flags -= {"DRAIN", "FAIL"}
            record.base = "IDLE"
        if record.base == "IDLE" and not record.flags & {"DRAIN", "FAIL"}:
            record.reason = ""
        self.schedule()
        return Completed(0, "", "")


def _count_gpus(gres: str) -> int:
    return sum(int(item.rpartition(":")[2]) for item in gres.split(",") if item.startswith("gpu"))
