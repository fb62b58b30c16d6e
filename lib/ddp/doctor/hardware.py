"""The rules for the nodes' processors, GPUs and fabric, and for where nodes of one kind differ in them."""

import collections

from ddp.base import Settings
from ddp.doctor.node_facts import Facts, Finding, Json, capacity, threads
from ddp.doctor.rules import Alike, Rule, Table, Values, compare, evaluate

_DETECT = "on {where}: slurmd -C shows what is there; then: juju run slurmd/N set-node-config reset=true"
_SOME = "submit-ddp nodelist=... (or exclude=...) takes"

PROCESSORS: Table = (
    (
        Rule("warning", lambda n: 0 < n.cpus < n.promised_cpus,
             "Slurm gives {promised_cpus} CPUs of it to jobs, and it has {cpus}: a rank's threads take turns", _DETECT),
        Rule("note", lambda n: n.cpus > 2 * n.promised_cpus > 0,
             "Slurm gives {promised_cpus} of its {cpus} CPUs to jobs; the others stay idle", _DETECT),
    ),
    Rule("warning", lambda n: n.wanted_cpus is not None and n.affinity < n.wanted_cpus,
         "a task that asked for {wanted_cpus} CPUs may run on {affinity} only: a rank's threads take turns",
         "on {where}: taskset -cp $(pidof slurmd); systemctl show slurmd -p CPUAffinity -p AllowedCPUs"),
    Rule("warning", lambda n: n.omp not in (None, n.threads),
         "OMP_NUM_THREADS is {omp} before a job sets it: each rank computes with that, not {threads}",
         "remove it from the program that this names: scontrol show config | grep TaskProlog"),
)  # fmt: skip
GPUS: Table = (
    (
        Rule(lambda n: "error" if n.build == "cuda" else "warning", lambda n: n.promised and not n.seen,
             "Slurm counts {promised} GPUs, but no CUDA driver responds here ({devices} in /dev)",
             "juju status slurm-gpu; nvidia-smi on the node"),
        Rule("error", lambda n: 0 < n.seen < n.wanted,
             "Slurm gave this job {wanted} GPUs, and the driver shows {seen}: a rank would find none",
             "nvidia-smi on the node; where these are MIG instances a process sees one: submit-ddp gpus-per-node=1"),
        Rule("note", lambda n: 0 < n.seen < n.promised and not n.is_left_out,
             "Slurm counts {promised} GPUs, this job was shown {seen}",
             "the others may be in use; else: nvidia-smi on the node"),
    ),
    Rule("warning", lambda n: n.no_peer,
         "GPUs cannot reach each other's memory directly ({no_peer}): ranks of this node talk through host memory",
         "nvidia-smi topo -p2p r; IOMMU and ACS settings"),
    Rule("warning", lambda n: n.down, "{down}", "ibstat; NCCL falls back to TCP, ten times slower"),
)  # fmt: skip
CARD: Table = (
    Rule("error", lambda c: c.ecc, "GPU {index} ({kind}) has {ecc} uncorrected memory errors",
         "scontrol update nodename={where} state=drain reason=ecc; nvidia-smi -r"),
)  # fmt: skip
NVLINKS: Table = (
    (
        Rule("warning", lambda n: n.links < n.most,
             "GPU{plural} {places} ({kind}): {links} NVLinks are up, {most} on others of the kind; "
             "ranks wait for the slowest",
             "on {where}: nvidia-smi nvlink --status; nvidia-smi nvlink --errorcounters; "
             "then: scontrol update nodename={where} state=drain reason=nvlink"),
        Rule("note", lambda n: not n.links and n.plural,
             "no NVLink of its GPUs ({kind}) is up: its ranks talk over PCIe",
             "are they bridged? nvidia-smi topo -m; with NVSwitches: systemctl status nvidia-fabricmanager"),
    ),
)  # fmt: skip
ALIKE = (
    Alike("note", lambda facts, name, _: capacity(facts, name).cpus,
          "the CPUs that Slurm gives to jobs differ: {groups}: a job takes as many everywhere as the least",
          f"{_SOME} some of them"),
    *(
        Alike("warning", lambda facts, name, about: _bf16(about, capacity(facts, name).gpus),
              f"the CPUs' bf16 differs: {{groups}}: {effect}", f"{_SOME} those alike",
              lambda values, has_none=has_none: ("none" in values) is has_none)
        for has_none, effect in ((True, "with one that has none all compute in fp32"),
                                 (False, "all wait for the slowest"))
    ),
)  # fmt: skip


def judge(settings: Settings, facts: Facts) -> list[Finding]:
    """Return the findings about what the nodes that returned a report compute with."""
    found: list[Finding] = []
    for name, about in sorted(facts.reports.items()):
        node = _node(settings, facts, name, about)
        found += [*evaluate(PROCESSORS, node), *evaluate(GPUS, node)]
        for index, card in enumerate(about["gpus"]["cards"]):
            found += evaluate(CARD, Values(where=name, index=index, kind=card["name"], ecc=card["ecc"]))
    return [*found, *compare(ALIKE, facts), *_nvlinks(facts)]


def _node(settings: Settings, facts: Facts, name: str, about: Json) -> Values:
    processors, gpus, node = about["processors"], about["gpus"], capacity(facts, name)
    ports = [port for port in about["infiniband"] if port["state"] != "ACTIVE"]
    return Values(
        where=name, build=settings.torch_build, promised_cpus=node.cpus, cpus=processors["cpus"] or 0,
        wanted_cpus=processors["wanted"], affinity=processors["affinity"], omp=processors["omp"], threads=threads(node),
        promised=node.gpus, seen=gpus["seen"], wanted=gpus["wanted"] or 0, is_left_out=name in facts.left_out,
        devices=f"{gpus['devices']} device files" if gpus["devices"] else "no device file",
        no_peer=", ".join(f"{one}-{other}" for one, other in gpus.get("no_peer", [])[:4]),
        down=", ".join(f"{port['device']} ({port['kind']}) is {port['state']}" for port in ports[:8]),
    )  # fmt: skip


def _bf16(about: Json, gpus: int) -> str | None:
    return None if gpus else "+".join(about["processors"]["bf16"]) or "none"


def _nvlinks(facts: Facts) -> list[Finding]:
    """Compare how many NVLinks are up on GPUs of the same name.

    How many there should be is not known: of an H100's 18 a PCIe card with bridges has 12, without them none.
    """
    places: dict[tuple[str, str, int], list[str]] = collections.defaultdict(list)
    for name, about in sorted(facts.reports.items()):
        for index, card in enumerate(about["gpus"]["cards"]):
            if card.get("links") is not None:
                places[name, card["name"], card["links"]].append(str(index))
    found: list[Finding] = []
    for (name, kind, links), indexes in places.items():
        most = max(number for _, other, number in places if other == kind)
        plural = "s" if len(indexes) > 1 else ""
        values = Values(where=name, kind=kind, links=links, most=most, plural=plural, places=", ".join(indexes))
        found += evaluate(NVLINKS, values)
    return found
