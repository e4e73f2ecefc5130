"""Token weights and loss terms by hand: a response of five tokens."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from care_jax.method import objective

YES, NO = jnp.array(True), jnp.array(False)
# think think (blank) answer answer
IS_THINK = jnp.array([1, 1, 0, 0, 0], bool)
IS_ANSWER = jnp.array([0, 0, 0, 1, 1], bool)
IS_RESPONSE = jnp.ones(5, bool)
GAMMA = 0.005

region_weights = functools.partial(objective.region_weights, gamma_pos=GAMMA)
surrogate = functools.partial(objective.clipped_surrogate, clip_low=0.2, clip_high=0.28)


def mask(*values):
    return jnp.array(values, bool)


NOTHING = mask(0, 0, 0, 0, 0)
SOME = mask(0, 1, 1, 1, 0)  # the first was forced, the last is padding
UNIFORM = {"is_response": SOME, "gamma_neg": 0.25, "is_uniform": True}
# (what differs from a positive row of two rationale and two answer tokens, its weights)
WEIGHTS = {
    "positive": ({}, [GAMMA, GAMMA, 0, 1, 1]),
    "negative": ({"is_positive": NO}, [0, 0, 0, 1, 1]),
    "negative with a weight": ({"is_positive": NO, "gamma_neg": 0.25}, [0.25, 0.25, 0, 1, 1]),
    "positive beside it": ({"gamma_neg": 0.25}, [GAMMA, GAMMA, 0, 1, 1]),
    "forced token": ({"is_response": mask(0, 1, 1, 1, 1)}, [0, GAMMA, 0, 1, 1]),
    "token of both spans": ({"is_think": IS_RESPONSE}, [GAMMA, GAMMA, GAMMA, 1, 1]),
    "no answer": ({"is_answer": NOTHING, "is_response": SOME}, [0, 1, 1, 1, 0]),
    "no answer, negative": (
        {"is_answer": NOTHING, "is_response": SOME, "is_positive": NO},
        [0, 1, 1, 1, 0],
    ),
    "uniform": (UNIFORM, [0, 1, 1, 1, 0]),
    "uniform, negative": (UNIFORM | {"is_positive": NO}, [0, 1, 1, 1, 0]),
    "uniform without an answer": (UNIFORM | {"is_answer": NOTHING}, [0, 1, 1, 1, 0]),
    # A token of both spans counts to the answer's share: 2 of 5.
    "share": (
        {"is_think": mask(1, 1, 1, 0, 0), "is_answer": mask(0, 0, 1, 1, 1), "gamma_share": 0.4},
        [1, 1, 1, 1, 1],
    ),
    "share of no rationale": ({"is_think": NOTHING, "gamma_share": 0.5}, [0, 0, 0, 1, 1]),
}


@pytest.mark.parametrize(("changes", "weights"), WEIGHTS.values(), ids=WEIGHTS)
def test_weights_of_rationale_answer_and_other_tokens(changes, weights):
    row = {"is_think": IS_THINK, "is_answer": IS_ANSWER, "is_response": IS_RESPONSE}
    w = region_weights(**{**row, "is_positive": YES, **changes})
    np.testing.assert_allclose(w, weights, rtol=1e-6)


@pytest.mark.parametrize("share", [0.2, 0.9])
def test_share_fixes_the_rationale_s_part_of_the_credit(share):
    """Two rationale and two answer tokens; then one of the rationale is forced."""
    for num_forced in (0, 1):
        is_response = jnp.arange(5) >= num_forced
        w = region_weights(IS_THINK, IS_ANSWER, is_response, YES, gamma_share=share)
        assert float(w[:2].sum() / w.sum()) == pytest.approx(share)
        np.testing.assert_allclose(w[2:], [0, 1, 1])
    w = region_weights(IS_THINK, IS_ANSWER, IS_RESPONSE, NO, gamma_neg=0.25, gamma_share=share)
    np.testing.assert_allclose(w, [0.25, 0.25, 0, 1, 1])


def test_token_advantages_share_out_the_rows_advantage():
    w = jnp.array([0.5, 0, 0, 1, 0.5])
    a = objective.token_advantages(jnp.array(-3.0), w, eps_w=0.0)
    np.testing.assert_allclose(a, [-0.75, 0, 0, -1.5, -0.75], rtol=1e-6)
    a = objective.token_advantages(jnp.array(-3.0), w, eps_w=1.0)
    np.testing.assert_allclose(a.sum(), -3 * 2 / 3, rtol=1e-6)
    a = objective.token_advantages(jnp.array(2.0), jnp.zeros(5), eps_w=1e-6)
    assert a.tolist() == [0] * 5


@pytest.mark.parametrize(
    ("ratio", "a", "value", "slope", "clipped"),
    [
        (1.0, 2.0, 2.0, 2.0, False),
        (1.2, 2.0, 2.4, 2.4, False),
        (1.5, 2.0, 2 * 1.28, 0.0, True),  # good token, already much likelier
        (0.5, 2.0, 1.0, 1.0, False),  # good token, less likely: free to recover
        (0.5, -2.0, -2 * 0.8, 0.0, True),  # bad token, already much less likely
        (1.5, -2.0, -3.0, -3.0, False),  # bad token, likelier: free to fall
        (0.9, -2.0, -1.8, -1.8, False),
        (1.5, 0.0, 0.0, 0.0, False),
    ],
)
def test_surrogate_is_the_smaller_of_the_free_and_the_clipped_term(ratio, a, value, slope, clipped):
    logp, old_logp, a = jnp.array([math.log(ratio) - 3]), jnp.array([-3.0]), jnp.array([a])
    np.testing.assert_allclose(surrogate(logp, old_logp, a), [value], rtol=1e-5)
    gradient = jax.grad(lambda logp: surrogate(logp, old_logp, a).sum())(logp)
    np.testing.assert_allclose(gradient, [slope], rtol=1e-5)
    is_clipped = objective.is_clipped(logp, old_logp, a, clip_low=0.2, clip_high=0.28)
    assert is_clipped.tolist() == [clipped]


@pytest.mark.parametrize(
    ("ratio", "a", "value", "slope"),
    [
        (2.9, -2.0, -5.8, -5.8),
        (9.0, -2.0, -6.0, 0.0),  # at most 3 times the advantage
        (9.0, 2.0, 2 * 1.28, 0.0),  # a good token has its clip already
        (0.5, -2.0, -2 * 0.8, 0.0),
        (9.0, 0.0, 0.0, 0.0),
    ],
)
def test_a_dual_clip_bounds_the_ratio_of_bad_tokens(ratio, a, value, slope):
    logp, old_logp, a = jnp.array([math.log(ratio) - 3]), jnp.array([-3.0]), jnp.array([a])
    term = functools.partial(surrogate, old_logp=old_logp, a=a, dual_clip=3.0)
    np.testing.assert_allclose(term(logp), [value], rtol=1e-5)
    gradient = jax.grad(lambda logp: term(logp).sum())(logp)
    np.testing.assert_allclose(gradient, [slope], rtol=1e-5)


@settings(deadline=None, max_examples=30)
@given(
    st.lists(
        st.tuples(st.floats(-8, 0), st.floats(-8, 0), st.floats(-3, 3)), min_size=6, max_size=6
    ),
    st.sampled_from([3.0, 0.0]),
)
def test_clipped_tokens_are_those_without_gradient(rows, dual_clip):
    logp, old_logp, a = jnp.array(rows, jnp.float32).T
    bounds = {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": dual_clip}
    gradient = jax.grad(lambda logp: surrogate(logp, old_logp, a, **bounds).sum())(logp)
    is_clipped = objective.is_clipped(logp, old_logp, a, **bounds)
    is_far = jnp.abs(a) > 1e-6  # a gradient below is 0 in float32 whether clipped or not
    np.testing.assert_array_equal(is_clipped & is_far, (gradient == 0) & is_far)


def test_absurd_log_ratios_stay_finite():
    logp, old_logp = jnp.array([0.0, 0.0, -300.0, -300.0, 0.0]), jnp.array([-300.0, -300, 0, 0, 0])
    a = jnp.array([0.0, -1.0, 1.0, 0.0, 0.0])
    for function in (
        lambda logp: surrogate(logp, old_logp, a).sum(),
        lambda logp: objective.k3(logp, old_logp).sum(),
    ):
        value, gradient = jax.value_and_grad(function)(logp)
        assert jnp.isfinite(value) and jnp.isfinite(gradient).all()


def test_k3_by_hand():
    # d = log 2: 2 - log 2 - 1;  d = -log 2: 1/2 + log 2 - 1.
    log2 = math.log(2)
    kl = objective.k3(jnp.array([-1.0, -1 - log2, -1.0]), jnp.array([-1.0, -1.0, -1 - log2]))
    np.testing.assert_allclose(kl, [0, 1 - log2, log2 - 0.5], rtol=1e-5, atol=1e-7)


def test_k3_averages_to_the_divergence():
    p, q = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.3, 0.5])
    kl = objective.k3(jnp.log(jnp.array(p)), jnp.log(jnp.array(q)))
    np.testing.assert_allclose((p * kl).sum(), (p * np.log(p / q)).sum(), rtol=1e-5)


IS_SAMPLED = jnp.array([1, 1, 1, 1, 0], bool)
OLD = jnp.array([-1.0, -2.0, -0.5, -3.0, -9.0])
BRANCH = jnp.array([0, 0, 0, 0, -1])


def sequence_terms(logp, A):
    """GSPO's terms of a row of four tokens, clipped to 1 - 3e-4 and 1 + 4e-4."""
    a = A * IS_SAMPLED / 4
    ratio = objective.sequence_log_ratio(logp, OLD, IS_SAMPLED, BRANCH)
    return objective.clipped_surrogate(
        ratio, jnp.zeros(5), a, clip_low=3e-4, clip_high=4e-4
    ), objective.is_clipped(ratio, jnp.zeros(5), a, clip_low=3e-4, clip_high=4e-4)


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize(
    ("moved", "A", "value", "slope", "is_clipped"),
    [
        (0.0, 2.0, 2.0, 2.0, False),
        (2e-4, 2.0, 2 * math.exp(2e-4), 2 * math.exp(2e-4), False),
        (5e-4, 2.0, 2 * 1.0004, 0.0, True),
        (5e-4, -2.0, -2 * math.exp(5e-4), -2 * math.exp(5e-4), False),
        (-3.5e-4, -2.0, -2 * 0.9997, 0.0, True),
        (-3.5e-4, 2.0, 2 * math.exp(-3.5e-4), 2 * math.exp(-3.5e-4), False),
    ],
)
def test_sequence_ratio_is_the_geometric_mean_and_clipped_as_one(
    jit, moved, A, value, slope, is_clipped
):
    """Single tokens go far beyond the range; what counts is the mean of their moves."""
    logp = OLD + moved + jnp.array([0.5, -0.5, 0.3, -0.3, 7.0])
    terms = jax.jit(sequence_terms) if jit else sequence_terms
    got, clipped = terms(logp, A)
    np.testing.assert_allclose(got.sum(), value, rtol=2e-6)
    assert clipped.tolist() == [is_clipped] * 4 + [False]
    gradient = jax.grad(lambda logp: terms(logp, A)[0].sum())(logp)
    # d s/d logp_t = s/|y| at each of the four tokens.
    np.testing.assert_allclose(gradient, [slope / 4] * 4 + [0], rtol=1e-5)


def test_sequence_ratio_has_the_gradient_of_its_token_form():
    """exp(logp - sg(logp) + sg(mean Δ)) at every token, as verl writes it, and no clip."""
    logp = OLD + jnp.array([2e-3, -1e-3, 5e-4, -1e-3, 0.7])
    a = jnp.float32(-1.5) * IS_SAMPLED / 4

    def token_form(logp):
        mean = jnp.sum((logp - OLD) * IS_SAMPLED) / 4
        return (jnp.exp(logp - jax.lax.stop_gradient(logp) + jax.lax.stop_gradient(mean)) * a).sum()

    ours = jax.value_and_grad(lambda logp: sequence_terms(logp, -1.5)[0].sum())(logp)
    for got, want in zip(ours, jax.value_and_grad(token_form)(logp), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5)


def test_sequence_ratio_of_a_row_without_tokens_is_one():
    nothing = jnp.zeros(5, bool)
    ratio, gradient = jax.value_and_grad(
        lambda logp: objective.sequence_log_ratio(logp, OLD, nothing, BRANCH).sum()
    )(OLD + 1)
    assert ratio == 0 and gradient.tolist() == [0] * 5


def test_sequence_ratio_of_each_response_in_a_row_is_its_own():
    """Moves of 1, 3 | prompt | 5, not sampled, 7 | 11: means of 2, 6 and 11."""
    branch = jnp.array([0, 0, -1, 2, 2, 2, 1])
    is_sampled = jnp.array([1, 1, 0, 1, 0, 1, 1], bool)
    moves = jnp.array([1.0, 3.0, 100.0, 5.0, 100.0, 7.0, 11.0])
    ratio = objective.sequence_log_ratio(moves - 4, jnp.full(7, -4.0), is_sampled, branch)
    assert ratio.tolist() == [2, 2, 0, 6, 0, 6, 11]


# Ratios of π_old to the sampler, and the weights that a cap of 2 leaves of them.
CORRECTED = {
    "truncate": ([0.1, 0.5, 1.0, 1.9, 2.5], [0.1, 0.5, 1.0, 1.9, 2.0], [0, 0, 0, 0, 1]),
    "mask": ([0.1, 0.51, 1.0, 1.9, 2.5], [0.0, 0.51, 1.0, 1.9, 0.0], [1, 0, 0, 0, 1]),
}


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("correction", CORRECTED)
def test_correction_by_hand(correction, jit):
    ratios, weights, capped = CORRECTED[correction]
    weight_of = functools.partial(objective.correction_weight, correction=correction, cap=2.0)
    weight, is_capped = (jax.jit(weight_of) if jit else weight_of)(jnp.log(jnp.array(ratios)))
    np.testing.assert_allclose(weight, weights, rtol=1e-6)
    assert is_capped.tolist() == capped


def test_correction_of_a_response_is_that_of_its_geometric_mean():
    """Tokens of ratios 8 and 1/2: 2 for both, and 1/4 for the response beside it."""
    ratio, branch = jnp.array([8.0, 0.5, 100.0, 0.25]), jnp.array([0, 0, -1, 1])
    is_sampled = branch >= 0
    mean = objective.sequence_log_ratio(jnp.log(ratio), jnp.zeros(4), is_sampled, branch)
    for cap, weights in ((3.0, [2, 2, 1, 0]), (1.5, [0, 0, 1, 0]), (5.0, [2, 2, 1, 0.25])):
        weight, _ = objective.correction_weight(mean, correction="mask", cap=cap)
        np.testing.assert_allclose(weight, weights, rtol=1e-6)


@pytest.mark.parametrize("correction", CORRECTED)
def test_correction_of_equal_or_absurd_probabilities(correction):
    """1 exactly for equal ones; finite whatever the ratio."""
    log_ratio = jnp.array([0.0, 300.0, -300.0])
    weight, _ = objective.correction_weight(log_ratio, correction=correction, cap=2.0)
    assert weight[0] == 1 and jnp.isfinite(weight).all() and weight[2] < 1e-6


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 10_000))
def test_jit_and_padding_change_nothing(seed):
    rng = np.random.default_rng(seed)
    is_think, is_answer = IS_THINK, IS_ANSWER & bool(rng.integers(0, 2))
    logp, old_logp = jnp.array(-rng.exponential(size=(2, 5)).astype(np.float32))
    A, is_positive = jnp.array(rng.normal(), jnp.float32), jnp.array(rng.random() < 0.5)
    args = (is_think, is_answer, IS_RESPONSE, logp, old_logp)

    plain = row_terms(*args, A, is_positive)
    np.testing.assert_allclose(jax.jit(row_terms)(*args, A, is_positive), plain, atol=1e-6)
    padded = row_terms(*(jnp.pad(x, (0, 3)) for x in args), A, is_positive)
    np.testing.assert_allclose(padded[:, :5], plain, atol=1e-6)
    assert not padded[:, 5:].any()


def row_terms(is_think, is_answer, is_response, logp, old_logp, A, is_positive):
    w = region_weights(is_think, is_answer, is_response, is_positive)
    a = objective.token_advantages(A, w, eps_w=1e-6)
    return jnp.stack([a, surrogate(logp, old_logp, a), objective.k3(logp, old_logp)])


@pytest.mark.parametrize("eps_w", [0.0, 1e-6])
def test_a_row_without_sampled_tokens_has_no_token_advantages(eps_w):
    """As the slot of a prompt that is not reflected, or a context that filled the response."""
    found = objective.token_advantages(jnp.array(2.0), jnp.zeros(5), eps_w=eps_w)
    np.testing.assert_array_equal(found, 0)
