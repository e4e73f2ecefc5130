"""What drawn sources share."""

import pytest

from care_jax.data.drawn import noise


@pytest.mark.parametrize(
    ("cue", "written"),
    [
        ("Wait.", "It is 3.Wait. It is 4."),
        (" Wait.", "It is 3. Wait. It is 4."),
        ("\nWait.\n", "It is 3.\nWait.\nIt is 4."),
    ],
)
def test_a_cue_is_joined_as_in_rl_and_a_space_is_behind_it(cue, written):
    assert "".join(noise.repair("It is 3.", cue, "It is 4.")) == written
