"""The slurm_gres interface: what may cross it, and what never gets into a gres.conf."""

import pathlib

import pydantic
import pytest
import yaml

from slurm_ddp.interfaces import slurm_gres

CASES = yaml.safe_load(pathlib.Path(__file__).with_suffix(".yaml").read_text())

LINE = "Name=gpu Type=h100 File=/dev/nvidia0 Cores=0-55 Links=-1,0 Flags=nvidia_gpu_env"


def test_a_nodes_databag_reads_back():
    offer = slurm_gres.NodeGres(node="slurmd-0", gres="gpu:h100:1", lines=(LINE,), awaits=True)
    assert slurm_gres.NodeGres.model_validate_json(offer.model_dump_json()) == offer


@pytest.mark.parametrize("line", CASES["lines_that_are_not_one_record_of_known_keys_are_refused"])
def test_lines_that_are_not_one_record_of_known_keys_are_refused(line: str):
    with pytest.raises(pydantic.ValidationError):
        slurm_gres.NodeGres(node="n", lines=(line,))


@pytest.mark.parametrize("node", ["", "a b", "a\nb", "a\n", "../a", "a=b", "-a", "a" * 254])
def test_node_names_that_are_none_are_refused(node: str):
    with pytest.raises(pydantic.ValidationError):
        slurm_gres.NodeGres(node=node)


@pytest.mark.parametrize("gres", ["gpu:1 state=idle", "gpu:'1'", "gpu\n", "\ngpu"])
def test_gres_strings_that_are_none_are_refused(gres: str):
    with pytest.raises(pydantic.ValidationError):
        slurm_gres.NodeGres(gres=gres)


def test_the_digest_follows_the_name_and_the_lines():
    base = slurm_gres.NodeGres(node="slurmd-0", lines=(LINE,))
    assert base.digest == slurm_gres.digest("slurmd-0", [LINE])
    assert base.digest == base.model_copy(update={"gres": "gpu:h100:1", "awaits": True}).digest
    others = [
        base.model_copy(update={"node": "slurmd-1"}),
        base.model_copy(update={"lines": (LINE, LINE)}),
        base.model_copy(update={"lines": ()}),
    ]
    assert len({base.digest, *(other.digest for other in others)}) == 4
