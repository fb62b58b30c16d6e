"""The block in gres.conf: other text stays, and it is read back as it was written."""

import pathlib

import hypothesis
import pytest
from hypothesis import strategies as st

from gpu import gres_conf
from gpu.gres_conf import Entry, GresConf
from slurm_ddp.interfaces import slurm_gres

LINE = "Name=gpu Type=h100 File=/dev/nvidia{} Flags=nvidia_gpu_env"
UPSTREAM = "# written by slurmctld\nAutoDetect=nvidia\n"


def entry(
    unit: str = "slurm-gpu/0", node: str = "slurmd-0", num: int = 1, *, awaits: bool = False
) -> Entry:
    lines = tuple(LINE.format(i) for i in range(num))
    return Entry.of(unit, slurm_gres.NodeGres(node=node, lines=lines, awaits=awaits))


def book(*entries: Entry, before: str = UPSTREAM, after: str = "") -> GresConf:
    return GresConf(before, after, {entry.unit: entry for entry in entries})


def test_the_block_holds_each_units_lines():
    one, two = entry("slurm-gpu/10", "slurmd-10", 2), entry("slurm-gpu/9", "slurmd-9", awaits=True)
    empty = entry("slurm-gpu/11", "slurmd-11", 0)
    assert book(one, two, empty).text() == (
        "# written by slurmctld\n"
        "AutoDetect=nvidia\n"
        "# BEGIN slurm-gpu: kept by the slurm-gpu charm; edits between these lines are lost\n"
        f"# slurm-gpu/9 slurmd-9 {two.digest} awaited\n"
        "NodeName=slurmd-9 AutoDetect=off Name=gpu Type=h100 File=/dev/nvidia0 Flags=nvidia_gpu_env\n"
        f"# slurm-gpu/10 slurmd-10 {one.digest}\n"
        "NodeName=slurmd-10 AutoDetect=off Name=gpu Type=h100 File=/dev/nvidia0 Flags=nvidia_gpu_env\n"
        "NodeName=slurmd-10 AutoDetect=off Name=gpu Type=h100 File=/dev/nvidia1 Flags=nvidia_gpu_env\n"
        f"# slurm-gpu/11 slurmd-11 {empty.digest}\n"
        "# END slurm-gpu\n"
    )


@pytest.mark.parametrize("before", ["", "AutoDetect=nvidia", "AutoDetect=nvidia\n", "\n\n"])
@pytest.mark.parametrize(
    "after", ["", "\n# by hand\nNodeName=old Name=gpu File=/dev/nvidia0\n", "no line end"]
)
def test_text_around_the_block_stays(before: str, after: str):
    text = book(entry(), before=before, after=after).text()
    again = gres_conf.parse(text)
    assert again.entries == {"slurm-gpu/0": entry()}
    assert again.text() == text
    rest = gres_conf.GresConf(again.before, again.after).text()
    assert rest in {before + after, f"{before}\n{after}"}
    assert book(before=before, after=after).text() == before + after


nodes_ = st.from_regex(r"[a-z][a-z0-9-]{0,8}", fullmatch=True)
entries = st.lists(
    st.builds(
        entry,
        st.builds(
            "{}/{}".format, st.from_regex(r"[a-z]{1,6}", fullmatch=True), st.integers(0, 2000)
        ),
        nodes_,
        st.integers(0, 3),
        awaits=st.booleans(),
    ),
    max_size=6,
)


@hypothesis.given(entries, st.sampled_from(["", UPSTREAM, "x"]))
def test_it_is_read_back_as_written(written: list[Entry], before: str):
    first = book(*written, before=before)
    again = gres_conf.parse(first.text())
    assert again.entries == first.entries
    assert again.text() == first.text()
    assert again.digest == first.digest


def test_lines_that_another_edited_are_asked_for_again():
    text = book(entry(), entry("slurm-gpu/1", "slurmd-1")).text()
    edited = text.replace(
        "slurmd-0 AutoDetect=off Name=gpu Type=h100", "slurmd-0 AutoDetect=off Name=gpu Type=a100"
    )
    assert set(gres_conf.parse(edited).entries) == {"slurm-gpu/1"}


@pytest.mark.parametrize(
    "text",
    [
        "# BEGIN slurm-gpu: x\n",
        "# END slurm-gpu\n",
        "# END slurm-gpu\n# BEGIN slurm-gpu\n",
        "# BEGIN slurm-gpu\n# END slurm-gpu\n# BEGIN slurm-gpu\n# END slurm-gpu\n",
    ],
)
def test_unpaired_markers_are_an_error(text: str):
    gres_conf.PATH.write_text(text)
    with pytest.raises(gres_conf.GresConfError) as caught:
        gres_conf.read()
    assert str(caught.value) == (
        f"{gres_conf.PATH}: the lines '# BEGIN slurm-gpu' and '# END slurm-gpu' do not pair up: "
        "remove them and what is between"
    )


def test_a_file_keeps_its_mode_and_a_link_stays_a_link(paths: pathlib.Path):
    real = paths / "shared-gres.conf"
    real.write_text(UPSTREAM)
    real.chmod(0o600)
    gres_conf.PATH.symlink_to(real)
    assert gres_conf.write(book(entry()))
    assert not gres_conf.write(book(entry()))
    assert gres_conf.PATH.is_symlink()
    assert real.stat().st_mode & 0o777 == 0o600
    assert gres_conf.read() == book(entry())


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("", "off"),
        (UPSTREAM, "nvidia"),
        ("autodetect=NVML  # all\n", "nvml"),
        ("#AutoDetect=nvml\n", "off"),
        ("NodeName=a AutoDetect=nvml Name=gpu\n", "off"),
        ("AutoDetect=nvml\nAutoDetect=off\n", "off"),
    ],
)
def test_the_global_detection(text: str, value: str):
    assert book(entry(), before=text).autodetect == value
    assert book(entry(), before="", after=f"\n{text}").autodetect == value
