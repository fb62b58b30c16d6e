"""How the sandbox parses `key=VALUE`: as Juju's YAML library does, then by the action's schema."""

import json
import pathlib
from collections.abc import Callable

import hypothesis
import pytest
import yaml
from hypothesis import strategies as st

from sandbox import settings, values
from sandbox.store import Application, SandboxError

ROOT = pathlib.Path(__file__).resolve().parents[2]
LINES = pathlib.Path(__file__).with_name("juju-values.tsv").read_text().splitlines()
MEASURED = [line.split("\t") for line in LINES if not line.startswith("# ")]
NAMES = "str int float bool NoneType list dict".split()  # Python's, and JSON's
TYPES: dict[str, str] = dict(
    zip(NAMES, "string integer number boolean null array object".split(), strict=True)
)


def app(charm: str) -> Application:
    metadata = yaml.safe_load((ROOT / "charms" / charm / "charmcraft.yaml").read_text())
    return Application(name=charm, charm=charm, source="", metadata=metadata)


@pytest.mark.parametrize(("text", "kind", "value"), MEASURED)
def test_a_value_is_what_juju_measured(text: str, kind: str, value: str):
    if kind == "refused":
        with pytest.raises(SandboxError, match=value.removeprefix("yaml: ")):
            values.parse(text)
        return
    found = values.parse(text)
    assert TYPES[type(found).__name__] == kind
    if kind == "number":
        assert found == float(value)
    elif kind != "null":
        assert found == (value if kind == "string" else json.loads(value))


digits = st.text("0123456789", min_size=1, max_size=15)
amount = st.integers(1, 10**15)
NOT_WORDS = "y n yes no on off true false null".split()
quoted = st.text(st.characters(max_codepoint=126, min_codepoint=32)).map(
    lambda text: text.replace("'", "''")
)
word = st.from_regex(r"[A-Za-z/][A-Za-z0-9._/+@-]{0,30}", fullmatch=True)
RULES: dict[
    str, tuple[st.SearchStrategy[str], Callable[[str], object]]
] = {  # typed text, and its meaning
    "an amount": (amount.map(str), int),
    "a negative amount": (amount.map(lambda n: str(-n)), int),
    "hexadecimal": (amount.map(hex), lambda text: int(text, 16)),
    "octal": (amount.map("0{:o}".format), lambda text: int(text, 8)),
    "octal of YAML 1.2": (amount.map(oct), lambda text: int(text, 8)),
    "binary": (amount.map(bin), lambda text: int(text, 2)),
    "underscores": (amount.map("{:_}".format), lambda text: int(text.replace("_", ""))),
    "not octal": (digits.map("09{}".format), float),
    "an exponent": (st.builds("{}e{}".format, amount, st.integers(0, 99)), float),
    "a fraction": (st.builds("{}.{}".format, digits, digits), float),
    "a size": (st.builds("{}{}".format, amount, st.sampled_from("KMGTmhdw")), str),
    "a word": (word.filter(lambda text: text.lower() not in NOT_WORDS), str),
    "quoted": (quoted.map("'{}'".format), lambda text: text[1:-1].replace("''", "'")),
    **{
        f"numbers joined by {mark}": (st.lists(digits, min_size=size).map(mark.join), str)
        for mark, size in ((":", 2), ("-", 2), (",", 2), (".", 3))
    },
}


@pytest.mark.parametrize("rule", RULES)
@hypothesis.given(st.data())
def test_typed_values_follow_the_tables_rules(rule: str, data: st.DataObject):
    typed, meaning = RULES[rule]
    text = data.draw(typed)
    wanted = meaning(text)
    found = values.parse(text)
    assert (type(found), found) == (type(wanted), wanted)
    assert values.parse(f"{text} ") == wanted


@hypothesis.given(
    st.text()
    | st.text("[]{}:,-&*!|>'\"%@`#?<~ \n\tax10.")
    | st.text(st.characters(categories=["Cs", "Cc"]))
)
def test_any_text_is_a_value_or_one_line(text: str):
    try:
        found = values.parse(text)
    except SandboxError as e:
        assert "\n" not in str(e)
    else:
        json.dumps(found)


@pytest.mark.parametrize(
    "text", ["[" * 100_000, "{a: " * 30_000, "&x [*x]", "!!int x", "!!binary =", "{1: a}"]
)
def test_values_that_juju_refuses_are_refused(text: str):
    with pytest.raises(SandboxError):
        values.parse(text)


CALLS: list[tuple[str, str, dict[str, object]]] = [
    ("slurm-gpu upgrade-driver", "branch=580", {"branch": 580}),
    ("slurm-gpu set-mig", "gpu=all profiles=none", {"gpu": "all", "profiles": "none"}),
    (
        "ddp-trainer submit-ddp",
        "time-limit=30 exclusive=true run=42",
        {"time-limit": 30, "exclusive": True, "run": 42},
    ),
    ("ddp-trainer list-runs", "since=2026-11-20 lines=0x10", {"since": "2026-11-20", "lines": 16}),
    ("ddp-trainer submit-ddp", "nodes=1e3 max-restarts=2.0", {"nodes": 1000, "max-restarts": 2}),
]


@pytest.mark.parametrize(("action", "words", "wanted"), CALLS)
def test_a_call_reaches_the_charm_with_juju_s_types(
    action: str, words: str, wanted: dict[str, object]
):
    charm, name = action.split()
    params = settings.action_params(
        app(charm), name, dict(word.split("=") for word in words.split())
    )
    assert {key: params[key] for key in wanted} == wanted
    assert not any(isinstance(value, float) for value in params.values())


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("args", "1e3", "1000.0 is not of type 'string', 'integer'"),
        ("args", "on", "True is not of type 'string', 'integer'"),
        ("args", "", "None is not of type 'string', 'integer'"),
        ("args", "a: $b", "{'a': '$b'} is not of type 'string', 'integer'"),
        ("nodes", "two", "'two' is not of type 'integer'"),
        ("nodes", "2.5", "2.5 is not of type 'integer'"),
        ("nodes", "1e300", "1e+300 is not of type 'integer'"),
        ("nodes", "@x", "not YAML: found character that cannot start any token"),
    ],
)
def test_values_of_another_yaml_type_are_refused(name: str, text: str, problem: str):
    with pytest.raises(SandboxError) as caught:
        settings.action_params(app("ddp-trainer"), "submit-ddp", {name: text})
    assert str(caught.value) == f"submit-ddp: parameter {name!r}: {problem}"
