"""`ddp submit` takes the same values as `sbatch --test-only`, judged by a real slurmctld."""

import collections.abc
import dataclasses
import os
import subprocess

import hypothesis
import pytest
from hypothesis import strategies as st

from ddp.environment import store
from ddp.options import config, fields, models
from ddp.problem import Problem
from ddp.settings import Settings
from ddp.slurm import cluster
from ddp.submit import resources, scripts
from functional import controller

pytestmark = pytest.mark.timeout(900)
EXAMPLES = hypothesis.settings(max_examples=25, deadline=None)
FEATURES = "ib opa a100 rack1 rack2 old h100 c5.xlarge a100-80gb nowhere".split()
CARDS = "a100 a100_3g.20gb tesla_t4 h100".split()


@dataclasses.dataclass(frozen=True)
class Site:
    """A controller, and the settings of an account."""

    settings: Settings

    def sbatch(self, *options: str) -> bool:
        """Return whether sbatch takes the options."""
        argv = ["sbatch", "--test-only", "--cpus-per-task=1", "--mem=300M", *options]
        done = subprocess.run(
            [*argv, "--wrap", "true"], check=False, capture_output=True, timeout=60
        )
        return done.returncode == 0

    def ddp(self, **given: object) -> str:
        """Return the script that Slurm takes. Raises Problem."""
        size = {"workload": "smoke", "cpus-per-task": 1, "memory": "300M"}
        params = fields.parse(models.SubmitDdp, {**size, **given})
        request = resources.training(params, cluster.partitions(params.reservation))
        program = scripts.Program(("smoke",), leaves_outcome=True)
        job = scripts.TrainingJob(self.settings, request, params, "first", program)
        script = job.texts(store.NOT_INSTALLED)["job.sbatch"]
        cluster.judge(script, request.partition)
        return script

    def holds(self, option: str, value: str, **more: int) -> None:
        """Assert that ddp takes the value if sbatch does, and else explains it in one line."""
        flags = [f"--{name}={number}" for name, number in more.items()]
        is_taken = self.sbatch(f"--{option}={value}", *flags)
        try:
            script = self.ddp(**{"gpus-per-node": 0, option: value, **more})
        except Problem as e:
            assert not is_taken, (value, str(e))
            assert len(str(e).splitlines()) == 1
        else:
            assert f"#SBATCH --{option}={value}\n" in script


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> collections.abc.Iterator[Site]:
    if missing := controller.lacks():
        pytest.fail(missing)
    settings = config.settings(config.load({"workspace": str(tmp_path_factory.mktemp("shared"))}))
    with (
        controller.running(tmp_path_factory.mktemp("slurm")) as conf,
        pytest.MonkeyPatch.context() as m,
    ):
        for name in list(os.environ):
            if name.startswith(("SLURM_", "SBATCH_")):
                m.delenv(name)
        m.setenv("SLURM_CONF", str(conf))
        yield Site(settings)


def joined(parts: st.SearchStrategy[str], marks: str) -> st.SearchStrategy[str]:
    return st.builds(
        lambda mark, some: mark.join(some),
        st.sampled_from(marks),
        st.lists(parts, min_size=1, max_size=3),
    )


def deeper(parts: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    more = joined(parts, "&|,")
    return more | more.map("({})".format) | more.map("[{}]".format) | parts.map("{}*1".format)


CONSTRAINTS = st.recursive(st.sampled_from(FEATURES), deeper, max_leaves=4)
HOSTLISTS = joined(st.sampled_from(["n0", "n[0-1]", "n[0,2]", "n[2-3]", "n3", "n[0", "m1"]), ",")
BEFORE = st.sampled_from(
    [
        "singleton",
        "afterok:1",
        "afterany:2:3",
        "after:4+10",
        "aftercorr:5",
        "afternotok:6_1",
        "afterok:x",
        "7",
    ]
)


@EXAMPLES
@hypothesis.given(constraint=CONSTRAINTS)
@hypothesis.example("ib*1&ib*1&ib*1*1")
def test_constraints(site: Site, constraint: str):
    site.holds("constraint", constraint)


@EXAMPLES
@hypothesis.given(names=joined(st.sampled_from(["gpu", "gpu_preempt", "nope"]), ","))
def test_lists_of_partitions(site: Site, names: str):
    site.holds("partition", names, nodes=1)


@EXAMPLES
@hypothesis.given(option=st.sampled_from(["nodelist", "exclude"]), hosts=HOSTLISTS)
def test_hostlists(site: Site, option: str, hosts: str):
    more = {"nodes": 1} if option == "exclude" else {}
    site.holds(option, hosts, **more)


@EXAMPLES
@hypothesis.given(
    kinds=st.lists(st.tuples(st.sampled_from(CARDS), st.integers(1, 4)), min_size=1, max_size=2)
)
def test_gpus_with_a_type(site: Site, kinds: list[tuple[str, int]]):
    cards = ",".join(f"{kind}:{number}" for kind, number in kinds)
    site.holds("gpus-per-node", cards, nodes=1)


@EXAMPLES
@hypothesis.given(dependency=joined(BEFORE, ",?"))
def test_dependencies(site: Site, dependency: str):
    site.holds("dependency", dependency, nodes=1)


def test_a_site_without_gpus_per_node_takes_gres(site: Site):
    script = site.ddp(nodes=1, sbatch="--gres=gpu:a100:2")
    assert "#SBATCH --gres=gpu:a100:2\n" in script
    assert "--gpus-per-node" not in script


@pytest.mark.parametrize(
    ("option", "value", "why"),
    [
        ("partition", "gpu,nope", "no partition 'nope'; there are: gpu, gpu_preempt"),
        ("constraint", "[ib|nowhere]", "no node of the cluster has nowhere"),
        ("exclude", "m1", "Slurm rejects the job: allocation failure: Invalid node name"),
        ("gpus-per-node", "h100:1", "h100:1 requested, nodes of partition gpu have a100"),
        ("reservation", "spring", "Slurm rejects the job: "),
        ("dependency", "afterok:x", "Slurm rejects the job: allocation failure: Job dependency"),
    ],
)
def test_a_refusal_names_the_option(site: Site, option: str, value: str, why: str):
    with pytest.raises(Problem) as caught:
        site.ddp(**{option: value, "nodes": 1})
    assert str(caught.value).startswith(f"{option}: {why}")
