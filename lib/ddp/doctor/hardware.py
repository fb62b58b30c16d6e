"""What doctor makes of the nodes' processors, GPUs and fabric, and of where nodes of one kind differ in them."""

import collections

from ddp.base import Settings
from ddp.doctor.node_facts import Facts, Finding, Json, Level, capacity, grouped, spelled, threads


def judge(settings: Settings, facts: Facts) -> list[Finding]:
    """Return the findings about what the nodes that answered compute with."""
    found: list[Finding] = []
    for name, about in sorted(facts.reports.items()):
        found += _about_processors(facts, name, about)
        found += _about_gpus(settings, facts, name, about)
    return [*found, *_about_unlike_processors(facts), *_about_nvlinks(facts)]


def _about_processors(facts: Facts, name: str, about: Json) -> list[Finding]:
    """Return whether a rank on this node gets the processors that its job asks for."""
    processors: Json = about["processors"]
    found: list[Finding] = []
    promised, there = capacity(facts, name).cpus, processors["cpus"] or 0
    detect = f"on {name}: slurmd -C shows what is there; then: juju run slurmd/N set-node-config reset=true"
    if 0 < there < promised:
        text = f"Slurm gives {promised} CPUs of it to jobs, and it has {there}: a rank's threads take turns"
        found.append(Finding("warning", name, text, detect))
    elif there > 2 * promised > 0:
        text = f"Slurm gives {promised} of its {there} CPUs to jobs; the others stay idle"
        found.append(Finding("note", name, text, detect))
    wanted, affinity = processors["wanted"], processors["affinity"]
    if wanted is not None and affinity < wanted:
        text = f"a task that asked for {wanted} CPUs may run on {affinity} only: a rank's threads take turns"
        remedy = f"on {name}: taskset -cp $(pidof slurmd); systemctl show slurmd -p CPUAffinity -p AllowedCPUs"
        found.append(Finding("warning", name, text, remedy))
    given, meant = processors["omp"], threads(capacity(facts, name))
    if given is not None and given != meant:
        text = f"OMP_NUM_THREADS is {given} before a job sets it: each rank computes with that, not {meant}"
        remedy = "take it out of the program that this names: scontrol show config | grep TaskProlog"
        found.append(Finding("warning", name, text, remedy))
    return found


def _about_gpus(settings: Settings, facts: Facts, name: str, about: Json) -> list[Finding]:
    gpus: Json = about["gpus"]
    promised, wanted = capacity(facts, name).gpus, gpus["wanted"] or 0
    found: list[Finding] = []
    if promised and not gpus["seen"]:
        devices = f"{gpus['devices']} device files" if gpus["devices"] else "no device file"
        level: Level = "error" if settings.torch_build == "cuda" else "warning"
        text = f"Slurm counts {promised} GPUs, but no CUDA driver answers here ({devices} in /dev)"
        found.append(Finding(level, name, text, "juju status slurm-gpu; nvidia-smi on the node"))
    elif 0 < gpus["seen"] < wanted:
        text = f"Slurm gave this job {wanted} GPUs, and the driver shows {gpus['seen']}: a rank would find none"
        remedy = "nvidia-smi on the node; where these are MIG instances a process sees one: submit-ddp gpus-per-node=1"
        found.append(Finding("error", name, text, remedy))
    elif promised and 0 < gpus["seen"] < promised and not facts.left_out.get(name):
        text = f"Slurm counts {promised} GPUs, this job was shown {gpus['seen']}"
        found.append(Finding("note", name, text, "the others may be in use; else: nvidia-smi on the node"))
    for index, card in enumerate(gpus["cards"]):
        if card["ecc"]:
            text = f"GPU {index} ({card['name']}) has {card['ecc']} uncorrected memory errors"
            found.append(
                Finding("error", name, text, f"scontrol update nodename={name} state=drain reason=ecc; nvidia-smi -r")
            )
    if gpus.get("no_peer"):
        pairs = ", ".join(f"{one}-{other}" for one, other in gpus["no_peer"][:4])
        text = f"GPUs cannot reach each other's memory directly ({pairs}): ranks of this node talk through host memory"
        found.append(Finding("warning", name, text, "nvidia-smi topo -p2p r; IOMMU and ACS settings"))
    down = [port for port in about["infiniband"] if port["state"] != "ACTIVE"]
    if down:
        text = ", ".join(f"{port['device']} ({port['kind']}) is {port['state']}" for port in down[:8])
        found.append(Finding("warning", name, text, "ibstat; NCCL falls back to TCP, ten times slower"))
    return found


def _about_unlike_processors(facts: Facts) -> list[Finding]:
    """Return where nodes differ in what all ranks must share: the number of CPUs, and bf16 where these compute."""
    found: list[Finding] = []
    cpus = grouped({name: str(capacity(facts, name).cpus) for name in facts.reports})
    if len(cpus) > 1:
        text = f"the CPUs that Slurm gives to jobs differ: {spelled(cpus)}: a job takes as many everywhere as the least"
        found.append(Finding("note", "nodes", text, "submit-ddp nodelist=... (or exclude=...) takes some of them"))
    bf16 = grouped(
        {
            name: "+".join(about["processors"]["bf16"]) or "none"
            for name, about in facts.reports.items()
            if not capacity(facts, name).gpus
        }
    )
    if len(bf16) > 1:
        text = f"the CPUs' bf16 differs: {spelled(bf16)}: "
        text += "with one that has none all compute in fp32" if "none" in bf16 else "all wait for the slowest"
        found.append(Finding("warning", "nodes", text, "submit-ddp nodelist=... (or exclude=...) takes those alike"))
    return found


def _about_nvlinks(facts: Facts) -> list[Finding]:
    """Return which GPUs have fewer NVLinks up than others of their kind, and where none has any.

    How many there should be is not known: of an H100's 18 a PCIe card with bridges has 12, without them none.
    """
    cards = [
        (name, index, card["name"], card["links"])
        for name, about in sorted(facts.reports.items())
        for index, card in enumerate(about["gpus"]["cards"])
        if card.get("links") is not None
    ]
    most: dict[str, int] = {}
    for _, _, kind, links in cards:
        most[kind] = max(links, most.get(kind, 0))
    found: list[Finding] = []
    fewer: dict[tuple[str, str, int], list[str]] = collections.defaultdict(list)
    unlinked: dict[tuple[str, str], int] = collections.Counter()
    for name, index, kind, links in cards:
        if links < most[kind]:
            fewer[name, kind, links].append(str(index))
        elif not links:
            unlinked[name, kind] += 1
    for (name, kind, links), places in fewer.items():
        which = f"GPU{'s' if len(places) > 1 else ''} {', '.join(places)} ({kind})"
        text = f"{which}: {links} NVLinks are up, {most[kind]} on others of the kind; ranks wait for the slowest"
        remedy = (
            f"on {name}: nvidia-smi nvlink --status; nvidia-smi nvlink --errorcounters; "
            f"then: scontrol update nodename={name} state=drain reason=nvlink"
        )
        found.append(Finding("warning", name, text, remedy))
    for (name, kind), number in unlinked.items():
        if number > 1:
            text = f"no NVLink of its GPUs ({kind}) is up: its ranks talk over PCIe"
            remedy = "are they bridged? nvidia-smi topo -m; with NVSwitches: systemctl status nvidia-fabricmanager"
            found.append(Finding("note", name, text, remedy))
    return found
