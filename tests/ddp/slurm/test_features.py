"""Whether a node meets an sbatch constraint, and the cases that only Slurm can decide."""

import hypothesis
import pytest
from hypothesis import strategies as st

from ddp.slurm import features

WORDS = st.sampled_from(["ib", "a100-80gb", "c5.xlarge", "old"])


@pytest.mark.parametrize(
    ("text", "has", "is_allowed"),
    [
        ("ib", {"ib"}, True),
        ("ib,a100", {"ib"}, False),
        ("ib&a100", {"ib", "a100"}, True),
        ("ib|opa", {"opa"}, True),
        ("(ib|opa)&a100", {"opa", "a100"}, True),
        ("(ib|opa)&a100", {"a100"}, False),
        ("!old", {"ib"}, True),
        ("!old", {"old"}, False),
        ("c5.xlarge", {"c5.large"}, False),
    ],
)
def test_a_node_is_judged_by_its_features(text: str, has: set[str], is_allowed: bool):
    constraint = features.Constraint(text)
    assert constraint.is_clear
    assert constraint.allows(has) == is_allowed


@pytest.mark.parametrize(
    ("text", "words", "num_nodes"),
    [
        ("[ib|opa]", ("ib", "opa"), 1),
        ("ib*2", ("ib",), 2),
        ("[a*2&b*3]", ("a", "b"), 5),
        ("gpu&[rack1|rack2]", ("gpu", "rack1", "rack2"), 1),
        ("a&b|c", ("a", "b", "c"), 1),
        ("(a", ("a",), 1),
        ("a&", ("a",), 1),
    ],
)
def test_constraints_that_only_slurm_evaluates(text: str, words: tuple[str, ...], num_nodes: int):
    constraint = features.Constraint(text)
    assert not constraint.is_clear
    assert constraint.words == words
    assert constraint.num_nodes == num_nodes
    assert constraint.allows({words[-1]})


@hypothesis.given(st.text(st.sampled_from("ab&|,()[]!*2 ")), st.sets(WORDS))
def test_no_text_is_misread(text: str, has: set[str]):
    constraint = features.Constraint(text)
    assert constraint.num_nodes >= 1
    assert constraint.allows(has) in (True, False)


@hypothesis.given(st.lists(WORDS, min_size=1), st.sampled_from(["&", ",", "|"]), st.sets(WORDS))
def test_a_list_with_one_operator_is_all_or_any(words: list[str], operator: str, has: set[str]):
    each = [word in has for word in words]
    expected = any(each) if operator == "|" else all(each)
    assert features.Constraint(operator.join(words)).allows(has) == expected
