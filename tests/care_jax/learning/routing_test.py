"""Metrics of routers, by hand: two tokens and a padding token, two layers, two of four experts."""

import jax.numpy as jnp
import numpy as np

from care_jax.learning import routing

CHOSEN = jnp.array([[[[0, 1], [2, 3]], [[0, 2], [2, 1]], [[3, 3], [3, 3]]]])
IS_COUNTED = jnp.array([[True, True, False]])


def test_load_counts_the_tokens_of_each_expert_and_no_padding():
    counts, even = routing.load(CHOSEN, IS_COUNTED, 4)
    np.testing.assert_array_equal(counts, [[2, 1, 1, 0], [0, 1, 2, 1]])
    np.testing.assert_array_equal(even, [[1], [1]])
    found = routing.of_load(counts / even)
    assert found == {"experts/busiest": 2, "experts/idle": 2 / 8}


def test_tokens_differ_by_their_sets_of_experts_where_they_have_a_route():
    """The first token has the same sets in another order, the second another in one layer."""
    routes = jnp.array([[[[1, 0], [3, 2]], [[0, 2], [2, 3]], [[-1, -1], [-1, -1]]]], jnp.int16)
    for is_fresh, differ, anywhere in (
        (None, 1 / 4, 1 / 2),
        ([True, True, True], 1 / 4, 1 / 2),
        ([True, False, True], 0, 0),
        ([False, True, True], 1 / 2, 1),
    ):
        is_fresh = is_fresh and jnp.array([is_fresh])
        found = routing.differing(CHOSEN, routes, is_fresh)
        shares = {name: float(some / all) for name, (some, all) in found.items()}
        assert shares == {"routes/differ": differ, "routes/differ_anywhere": anywhere}
