"""The numbers of the streams are part of what a run can be repeated by."""

import jax
import numpy as np
import pytest

from care_jax.devices import streams


@pytest.mark.parametrize(
    ("name", "number"), [("EVALUATION", 2147483647), ("PROBE", 2147483646), ("REPAIRS", 2147483645)]
)
def test_a_stream_has_the_key_it_always_had(name, number):
    assert getattr(streams, name) == number
    key = streams.key_of(7, getattr(streams, name))
    expected = jax.random.fold_in(jax.random.key(7), number)
    np.testing.assert_array_equal(jax.random.key_data(key), jax.random.key_data(expected))
