import dataclasses

import mutations
import pytest


def test_every_mutation_applies_and_names_tests_that_exist():
    assert mutations.problems() == []
    assert len(set(mutations.MUTATIONS)) == len(mutations.MUTATIONS) > 60


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"old": "order = num_think"}, "found 0"),
        ({"old": "num_answer"}, "expected 'num_answer' once"),
        ({"new": "order = num_answer,, num_think"}, "is not Python"),
        ({"new": "order = (num_answer, num_think)"}, "changes no code"),
        ({"tests": ("gone_test.py",)}, "no test tests/gone_test.py"),
        ({"tests": ("care_jax/method/select_test.py::test_gone",)}, "select_test.py::test_gone"),
    ],
)
def test_a_mutation_that_does_not_apply_is_named(change, message):
    (longest,) = (each for each in mutations.MUTATIONS if "longest" in each.breaks)
    (problem,) = mutations.problems([dataclasses.replace(longest, **change)])
    assert problem.startswith(str(longest)) and message in problem
