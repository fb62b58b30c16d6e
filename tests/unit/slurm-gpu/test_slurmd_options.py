"""SLURMD_OPTIONS: only the GPUs in it change, and upstream's charm can read what we wrote."""

import pathlib
import shlex

import hypothesis
import pytest
from conftest import CONF, OPTIONS, WITH_GPU
from hypothesis import strategies as st

from node import slurmd_options
from slurm_ddp import files

PACKAGE = '# Additional options that are passed to the slurmd daemon\n#SLURMD_OPTIONS=""\n'


def upstream_reads(text: str) -> dict[str, str | bool]:
    """Parse the line as upstream: a word with a dash takes the next one without a dash."""
    value = next(
        line.partition("=")[2] for line in text.splitlines() if line.startswith("SLURMD_OPTIONS=")
    )
    words = shlex.split(value)
    options: dict[str, str | bool] = {}
    for i, word in enumerate(words):
        if word.startswith("-"):
            following = words[i + 1] if i + 1 < len(words) else "-"
            options[word] = True if following.startswith("-") else following
    return options


def upstream_writes(options: dict[str, str | bool]) -> str:
    words = [
        word
        for key, value in options.items()
        for word in ([key] if value is True else [key, str(value)])
    ]
    return f"SLURMD_OPTIONS={shlex.join(words)}\n"


def test_the_last_line_counts_as_it_does_for_systemd():
    options = slurmd_options.parse(f"SLURMD_OPTIONS=-N old\n{OPTIONS}")
    assert options == slurmd_options.Options(node="slurmd-0", conf=CONF, conf_server="ctl:6817")


@pytest.mark.parametrize(
    ("before", "gres", "after"),
    [
        ("cpus=2 features=x", "gpu:a:1", "cpus=2 features=x gres=gpu:a:1"),
        ("cpus=2 gres=gpu:a:1 features=x", "gpu:b:2", "cpus=2 gres=gpu:b:2 features=x"),
        ("cpus=2 Gres=gpu:a:1", "gpu:b:2", "cpus=2 Gres=gpu:b:2"),
        ("cpus=2 gres= features=x", "gpu:b:2", "cpus=2 gres=gpu:b:2 features=x"),
        ("cpus=2 gres=gpu:a:1 features=x", None, "cpus=2 features=x"),
        ("gres=gpu:a:1 features=x", None, "features=x"),
        ("cpus=2 features=gres=x", "gpu:a:1", "cpus=2 features=gres=x gres=gpu:a:1"),
    ],
)
def test_changing_the_gres(before: str, gres: str | None, after: str):
    text = f"# kept\nSLURMD_OPTIONS=-Z --conf '{before}' --debug -N n-0\nOTHER='a  b'\n"
    changed = slurmd_options.with_gres(text, gres)
    assert changed == text.replace(f"'{before}'", shlex.quote(after))


@pytest.fixture
def beside(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The texts that upstream's slurmd writes into the file, one for each prepared new text."""
    texts: list[str] = []
    real = files.ensure_file

    def ensure_file(path: pathlib.Path, content: str, *, mode: int) -> bool:
        done = real(path, content, mode=mode)
        if texts:
            slurmd_options.PATH.write_text(texts.pop(0))
        return done

    monkeypatch.setattr(slurmd_options.files, "ensure_file", ensure_file)
    return texts


def test_options_that_upstream_writes_at_the_same_time_are_kept(beside: list[str]):
    """Its set-node-config in parallel with an action."""
    slurmd_options.PATH.write_text(OPTIONS)
    beside.append(OPTIONS.replace("realmemory=4000", "realmemory=3000"))
    assert slurmd_options.ensure_gres("gpu:mock_gpu:1")
    assert slurmd_options.PATH.read_text() == WITH_GPU.replace("realmemory=4000", "realmemory=3000")
    assert [path.name for path in slurmd_options.PATH.parent.iterdir()] == ["slurmd"]


def test_a_file_that_changes_all_the_time_is_left_alone(beside: list[str]):
    slurmd_options.PATH.write_text(OPTIONS)
    beside += [OPTIONS.replace("realmemory=4000", f"realmemory={size}") for size in range(9)]
    with pytest.raises(slurmd_options.OptionsError, match="changed 5 times while it was edited"):
        slurmd_options.ensure_gres("gpu:mock_gpu:1")
    assert "realmemory=4 " in slurmd_options.PATH.read_text()
    assert [path.name for path in slurmd_options.PATH.parent.iterdir()] == ["slurmd"]


@pytest.mark.parametrize(
    ("conf", "held"),
    [
        ("cpus=2 features=x", "cpus=2 features=x state=drain"),
        ("cpus=2 State=idle features=x", "cpus=2 features=x state=drain"),
        ("cpus=2 state=down", "cpus=2 state=drain"),
    ],
)
def test_a_start_with_the_node_drained(conf: str, held: str):
    text = slurmd_options.drained(
        f"# a comment\nSLURMD_OPTIONS=--conf '{conf}' -Z -N n-0 --conf-server a:1\n"
    )
    assert text == f"SLURMD_OPTIONS=--conf '{held}' -Z -N n-0 --conf-server a:1\n"


keys = st.sampled_from("cpus boards realmemory memspeclimit features weight port nodeaddr".split())
values = st.text("abcXYZ0189:,._-+[]()/%@", max_size=12)
pairs = st.lists(st.tuples(keys, values), unique_by=lambda pair: pair[0], min_size=1).map(
    lambda found: [f"{key}={value}" for key, value in found]
)
gres_strings = st.lists(
    st.tuples(
        st.sampled_from(["gpu:h100", "gpu:nvidia_a100-sxm4-40gb", "gpu", "shard"]),
        st.integers(1, 16),
    ),
    min_size=1,
    unique_by=lambda pair: pair[0],
).map(lambda found: ",".join(f"{kind}:{count}" for kind, count in found))
flags = st.dictionaries(
    st.sampled_from(["-Z", "-N", "--conf-server", "-v", "--parameters", "-L"]),
    st.one_of(
        st.just(True),
        st.text("abc019:._/ '\"$\\#", min_size=1, max_size=10).filter(lambda s: s[0] not in "-"),
    ),
)


@st.composite
def files_of_upstream(draw: st.DrawFn) -> tuple[str, dict[str, str | bool]]:
    words = draw(pairs)
    if draw(st.booleans()):
        words.insert(
            draw(st.integers(0, len(words))), f"gres={draw(st.one_of(st.just(''), gres_strings))}"
        )
    options: dict[str, str | bool] = {"--conf": draw(st.sampled_from([" ", "  "])).join(words)}
    options |= draw(flags)
    order = draw(st.permutations(list(options)))
    line = upstream_writes({key: options[key] for key in order})
    before = draw(st.sampled_from(["", "# a comment\n", PACKAGE, "PATH=/x\n\n"]))
    after = draw(st.sampled_from(["", "OTHER=--conf 'gres=gpu:9'\n", "\n# end"]))
    return before + line + after, options


@hypothesis.given(files_of_upstream(), st.one_of(st.none(), gres_strings), gres_strings)
def test_an_edit_changes_only_the_gres(
    file: tuple[str, dict[str, str | bool]], gres: str | None, other: str
):
    text, options = file
    hypothesis.assume("'" not in str(options["--conf"]))
    changed = slurmd_options.with_gres(text, gres)
    read = slurmd_options.parse(changed)
    assert read is not None
    assert read.gres == gres
    # Everything but the --conf word is the same, byte for byte.
    word, new = shlex.quote(str(options["--conf"])), shlex.quote(read.conf or "")
    assert changed.replace(f"--conf {new}", "--conf ?", 1) == text.replace(
        f"--conf {word}", "--conf ?", 1
    )
    # In --conf, everything but the gres word is the same and in the same order.
    assert _without_gres(read.conf or "") == _without_gres(str(options["--conf"]))
    # Upstream reads and writes back what we wrote.
    again = upstream_reads(changed)
    assert {key: value for key, value in again.items() if key != "--conf"} == _as_upstream_reads(
        options
    )
    # Writing twice changes nothing, and a later write does not depend on an earlier one.
    assert slurmd_options.with_gres(changed, gres) == changed
    onward = slurmd_options.parse(slurmd_options.with_gres(changed, other))
    assert onward is not None
    assert onward.gres == other


def _without_gres(conf: str) -> list[str]:
    return [word for word in conf.split() if not word.lower().startswith("gres=")]


def _as_upstream_reads(options: dict[str, str | bool]) -> dict[str, str | bool]:
    read = upstream_reads(upstream_writes(options))
    return {key: value for key, value in read.items() if key != "--conf"}


@hypothesis.given(st.text(max_size=80))
def test_any_text_is_read_or_refused_in_words(text: str):
    try:
        slurmd_options.parse(f"SLURMD_OPTIONS={text}\n")
        slurmd_options.with_gres(f"SLURMD_OPTIONS={text}\n", "gpu:1")
    except slurmd_options.OptionsError as e:
        assert "\n" not in str(e)
