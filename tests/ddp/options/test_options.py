"""One declaration makes an option's flag, parameter, directive, check and reference.

No injection.
"""

import ast
import pathlib
import shlex

import hypothesis
import pytest
import script_texts
import yaml
from harness import META
from hostile_values import FREE, NASTY, ROAMING, TEXTS, is_slurms
from hypothesis import strategies as st

from ddp.actions import verbs
from ddp.node import spec
from ddp.options import config, declared, fields, models
from ddp.problem import ParameterError
from ddp.settings import Settings
from scripts import actions

MODELS = {name: verb.options for name, verb in verbs.ACTIONS.items()}


# The parameters that an action requires
NEEDED: dict[str, dict[str, object]] = {
    "add-user": {"user": "bob", "account": "physics"},
    "sync-users": {"group": "ml"},
}


def refusal(model: type[fields.Parsed], given: dict[str, object]) -> str:
    with pytest.raises(ParameterError) as caught:
        fields.parse(model, given)
    line = str(caught.value)
    assert line.isprintable(), "one line, with nothing that a terminal would obey"
    assert line.isascii()
    assert len(line) < 700
    return line


def test_no_directive_of_a_job_can_be_given_past_its_option(settings: Settings):
    """Each directive of a job is an option, or sbatch= rejects it."""
    script = script_texts.texts(settings)["job.sbatch"]
    names = {
        line[10:].partition("=")[0] for line in script.splitlines() if line.startswith("#SBATCH --")
    }
    assert {"nodes", "mem", "time", "output", "requeue", "signal"} <= names
    for name in names:
        line = refusal(models.SubmitDdp, {"sbatch": f"--{name}=1"})
        assert line.startswith(
            (f"sbatch: --{name} has its own option; use ", f"sbatch: --{name} is set by the job")
        )
    assert fields.parse(models.SubmitDdp, {"sbatch": "--switches=3"}).sbatch, (
        "an option of sbatch alone passes"
    )
    for model in (models.Doctor, models.PrepareDataset, models.BenchmarkCollectives):
        for name in ("nodes", "mem", "time", "cpus-per-task", "job-name", "account"):
            assert refusal(model, {"sbatch": f"--{name}=1"}).startswith(f"sbatch: --{name} ")


def test_the_copies_of_the_options_are_current():
    assert actions.CHARM.read_text() == actions.updated(actions.CHARM.read_text()), (
        "run: tox -e reference"
    )
    assert actions.PAGE.read_text() == actions.page(), "run: tox -e reference"


@pytest.mark.parametrize(
    ("action", "name"),
    [(action, name) for action, name in TEXTS if name not in FREE and not is_slurms(action, name)],
)
def test_nothing_hostile_passes(action: str, name: str):
    for nasty in NASTY + ROAMING:
        assert refusal(MODELS[action], {name: nasty}).startswith(f"{name}: ")


@pytest.mark.parametrize(
    ("action", "name"), [(action, name) for action, name in TEXTS if is_slurms(action, name)]
)
def test_words_of_slurm_stay_on_their_line(action: str, name: str):
    needed = NEEDED.get(action, {})
    for text in NASTY + ROAMING:
        try:
            fields.parse(MODELS[action], needed | {name: text})
        except ParameterError:
            assert refusal(MODELS[action], needed | {name: text}).startswith(f"{name}: ")
        else:
            assert text.isascii()
            assert text.isprintable()
            assert not {*"\"'`\\"} & set(text)
            assert text.strip() == text.lstrip("-"), "no option of Slurm's programs"


@hypothesis.settings(suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture])
@hypothesis.given(st.from_regex(r"[!#-&(-,.-\[\]-_a-~][ !#-&(-\[\]-_a-~]{0,40}", fullmatch=True))
def test_words_of_slurm_are_one_directive_as_they_are(settings: Settings, text: str):
    hypothesis.assume(text == text.strip())
    script = script_texts.texts(settings, constraint=text)["job.sbatch"]
    line = next(line for line in script.splitlines() if line.startswith("#SBATCH --constraint="))
    assert shlex.split(line.removeprefix("#SBATCH ")) == [f"--constraint={text}"]
    if "#" in text:
        assert line.endswith(f'"{text}"'), "# begins a comment of sbatch's"


@pytest.mark.parametrize("name", FREE)
def test_a_programs_words_are_whatever_a_shell_reads_or_one_line(name: str):
    for text in NASTY + ROAMING:
        try:
            params = fields.parse(models.SubmitDdp, {name: text})
        except ParameterError:
            assert refusal(models.SubmitDdp, {name: text}).startswith(f"{name}: ")
        else:
            assert "\0" not in text
            pairs = ["=".join(pair) for pair in fields.variables(params.env)]
            words = {"args": list(params.words), "env": pairs, "again": shlex.split(params.again)}
            assert words[name] == shlex.split(text)


words = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]))
names = (
    st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,20}", fullmatch=True)
    .map(lambda name: f"MY_{name}")
    .filter(lambda name: not fields.is_secret(name))
)


@hypothesis.settings(suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture])
@hypothesis.given(args=st.lists(words), env=st.dictionaries(names, words))
def test_arguments_and_variables_reach_the_program_as_they_are(
    settings: Settings, args: list[str], env: dict[str, str]
):
    given = {"args": shlex.join(args), "env": shlex.join("=".join(pair) for pair in env.items())}
    assert fields.parse(models.SubmitDdp, given).words == tuple(args)
    texts = script_texts.texts(settings, env=given["env"], args=given["args"])
    job = spec.parse(spec.JobSpec, texts["program/job.json"])
    login = {"USER", "LOGNAME", "HOME", "LANG", "TZ"}
    assert {name: value for name, value in job.variables if name not in login} == env
    assert texts["job.sbatch"] == script_texts.texts(settings)["job.sbatch"], (
        "none reaches the script"
    )


def test_the_variables_that_a_job_sets_are_reserved_and_no_others():
    """Read from the program: variables that it adds to its environment, except defaults."""
    may_be_given = {
        "CUDA_VISIBLE_DEVICES",
        "GLOO_SOCKET_IFNAME",
        "NCCL_SOCKET_IFNAME",
        "OMP_NUM_THREADS",
        "PYTHONPATH",
    }
    may_be_given |= {"LD_LIBRARY_PATH", "PATH", "TORCH_GLOO_LAZY_INIT"}
    found: set[str] = set()
    for name in ("task", "ranks", "supervisor", "network"):
        source = (pathlib.Path(spec.__file__).parent / f"{name}.py").read_text()
        for item in ast.walk(ast.parse(source)):
            keys: list[ast.expr | None] = []
            if isinstance(item, ast.Subscript) and isinstance(item.ctx, ast.Store):
                keys = [item.slice]
            elif isinstance(item, ast.Assign | ast.AugAssign) and isinstance(item.value, ast.Dict):
                keys = item.value.keys
            found |= {str(key.value) for key in keys if isinstance(key, ast.Constant)}
    found = {name for name in found if name.isupper()} - may_be_given
    torchruns = {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "ROLE_NAME"}
    torchruns |= {
        f"{kind}_{name}" for kind in ("GROUP", "LOCAL", "ROLE") for name in ("RANK", "WORLD_SIZE")
    }
    elastic = ("ERROR_FILE", "MAX_RESTARTS", "RESTART_COUNT", "RUN_ID", "USE_AGENT_STORE")
    torchruns |= {f"TORCHELASTIC_{name}" for name in elastic}
    assert found | torchruns == fields.RESERVED
    for free in (
        "RUN_NAME",
        "JOB_TYPE",
        "PROFILE_MEMORY",
        "MASTER_NAME",
        "PATH",
        "HOME",
        "LD_PRELOAD",
        "SRUN_DEBUG",
    ):
        assert fields.parse(models.SubmitDdp, {"env": f"{free}=x"}).env
    for reserved in (*found, "SLURM_JOB_ID", "SLURMD_NODENAME"):
        assert refusal(models.SubmitDdp, {"env": f"{reserved}=x"}).startswith(
            f"env: {reserved} is set by the job"
        )


@hypothesis.given(
    st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,20}", fullmatch=True),
    st.sampled_from("KEY TOKEN SECRET PASSWORD PASSPHRASE".split()),
    st.text(st.characters(exclude_characters="\0")),
)
def test_no_secret_is_taken_as_a_variable_or_shown(start: str, end: str, value: str):
    for name in (start + end, (start + end).lower()):
        error = refusal(models.SubmitDdp, {"env": shlex.join([f"{name}=~{value}~"])})
        assert error.startswith("env: ")
        assert f"~{value}~" not in error


@hypothesis.given(
    st.dictionaries(
        st.from_regex(r"[A-Z_]{1,9}", fullmatch=True), st.text(st.characters(codec="ascii"))
    )
)
def test_a_file_of_variables_is_read_as_it_is_written(variables: dict[str, str]):
    kept = {
        name: "".join(value.split())
        for name, value in variables.items()
        if name not in fields.RESERVED
    }
    kept = {
        name: value
        for name, value in kept.items()
        if "\0" not in value and not name.startswith("SLURM")
    }
    for form in ("{}={}", "export {}='{}'", '# x\n\n{}="{}"\r'):
        text = "\n".join(form.format(name, value) for name, value in kept.items())
        found = fields.parse_variables(text)
        assert found == kept or form == "{}={}"
        assert list(found) == list(kept)
    for line in ("A", "1A=secret", "A B=secret", "RANK=secret"):
        with pytest.raises(
            ValueError, match=r"^(line 2 is not NAME=value|RANK is set by the job)"
        ) as caught:
            fields.parse_variables(f"B=x\n{line}")
        assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    "name", [str(f.alias) for f in config.Config.model_fields.values() if f.annotation is not bool]
)
def test_nothing_hostile_passes_in_the_configuration(name: str):
    for nasty in filter(None, NASTY):
        assert refusal(config.Config, {name: nasty}).startswith(f"{name}: ")


@pytest.mark.parametrize("action", list(MODELS))
def test_the_declaration_of_an_option_is_what_its_parser_allows(action: str):
    needed = NEEDED.get(action, {})
    for option in declared.options(MODELS[action]):
        for bound, step in ((option.minimum, -1), (option.maximum, 1)):
            if bound is not None:
                fields.parse(MODELS[action], needed | {option.name: bound})
                assert refusal(MODELS[action], needed | {option.name: bound + step}).startswith(
                    f"{option.name}: "
                )
        for choice in option.choices:
            fields.parse(MODELS[action], needed | {option.name: choice})
            assert isinstance(yaml.safe_load(choice), str), (
                "Juju reads on, off, yes and no as booleans"
            )
        if option.takes_number:
            number = 2026 if option.name in ("since", "older") else 30
            params = fields.parse(MODELS[action], needed | {option.name: number})
            assert getattr(params, option.name.replace("-", "_")) == str(number)


def test_numbers_are_natural_for_names_and_amounts():
    submit = {option.name for option in declared.options(models.SubmitDdp) if option.takes_number}
    assert {"run", "time-limit", "memory", "profile-ranks", "partition", "args"} <= submit
    assert not {"workload", "env", "sbatch"} & submit


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"nodes": 0}, "nodes: 0 is not allowed; a whole number from 1 to 4096"),
        ({"nodes": True}, "nodes: True is not allowed; a whole number"),
        ({"nodes": "2"}, "nodes: '2' is not allowed; a whole number"),
        ({"wait": "yes"}, "wait: 'yes' is not allowed; true or false"),
        ({"partition": False}, "partition: False is not allowed; a text"),
        (
            {"run": "../x"},
            "run: '../x' is not allowed; only letters, digits and . _ -, beginning with a letter or digit",
        ),
        ({"args": "x" * 1000000}, "args: 1000000 characters; at most 32768 are allowed"),
        (
            {"workload": "/a/../b"},
            "workload: '/a/../b' is not allowed; write the path without . and .. as parts",
        ),
        (
            {"memory": 0},
            "memory: '0' is not allowed; a whole number with M, G or T, such as 8G, or site",
        ),
        ({"env": "A"}, "env: A has no value; write A=value"),
        (
            {"env": "A=b c=d 1=2"},
            "env: '1=2' is not NAME=value; quote a value with blanks, as in A='b c'",
        ),
        (
            {"args": "it's"},
            'args: "it\'s" is not allowed; no closing quotation: write \\ before a quote or a backslash',
        ),
        ({"env": "RANK=1"}, "env: RANK is set by the job itself; choose another variable"),
    ],
)
def test_a_refusal_names_the_option_and_what_is_allowed(given: dict[str, object], line: str):
    assert refusal(models.SubmitDdp, given) == line


@pytest.mark.parametrize("action", list(MODELS))
def test_an_unknown_option_is_rejected_by_name(action: str):
    known = {option.name: option.text.only_terminal for option in declared.options(MODELS[action])}
    assert set(META["actions"][action]["params"]) == {
        name for name, is_typed in known.items() if not is_typed
    }
    assert (
        refusal(MODELS[action], {"nodse": 2})
        == f"nodse: unknown option; there are: {', '.join(sorted(known))}"
    )
    assert len(refusal(models.OneRun, {"\x1b[31m$(id)\n" * 100: 1})) < 200


@pytest.mark.parametrize(
    ("text", "mib"), [("512", 512), ("512M", 512), ("8G", 8192), ("2T", 2 * 1024 * 1024)]
)
def test_memory(text: str, mib: int):
    assert fields.memory_mb(text) == mib


def test_variables():
    parsed = fields.parse(models.SubmitDdp, {"env": "NCCL_DEBUG=INFO  A='b = c' EMPTY="})
    assert fields.variables(parsed.env) == (("NCCL_DEBUG", "INFO"), ("A", "b = c"), ("EMPTY", ""))


@pytest.mark.parametrize("word", ["--clusters=west", "--cluster=west", "--clus=west"])
def test_another_cluster_is_chosen_by_slurms_variable_for_all_commands(word: str):
    line = refusal(models.SubmitDdp, {"sbatch": word})
    assert "would leave the job out of ddp list; set the variable SLURM_CLUSTERS" in line
