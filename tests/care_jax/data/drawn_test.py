"""What drawn sources share."""

import pytest

from care_jax.data import drawn


@pytest.mark.parametrize(
    ("cue", "written"),
    [
        ("Wait.", "It is 3. Wait. It is 4."),
        (" Wait.", "It is 3. Wait. It is 4."),
        ("\nWait.\n", "It is 3.\nWait.\nIt is 4."),
    ],
)
def test_a_repair_has_one_space_or_the_cue_s_own_between_its_parts(cue, written):
    assert "".join(drawn.repair("It is 3.", cue, "It is 4.")) == written
