"""Positions by hand, and windows that are whole and consecutive."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models.positions import feature_indices, pack_images, prompt_positions


def test_text_and_image_positions_by_hand(config):
    image = [config.image_token_id]
    tokens = np.array([5, 6, *image * 6, 7, *image * 1, 8])
    grids = np.array([[1, 4, 6], [1, 2, 2]])
    positions, after = prompt_positions(tokens, grids, config)
    expected = [
        *([0, 0, 0], [1, 1, 1]),
        *([2, 2, 2], [2, 2, 3], [2, 2, 4], [2, 3, 2], [2, 3, 3], [2, 3, 4]),
        *([5, 5, 5], [6, 6, 6], [7, 7, 7]),
    ]
    np.testing.assert_array_equal(positions, expected)
    assert after == 8
    features = [0, 1, 4, 2, 3, 5] if config.vision.window_size else range(6)
    np.testing.assert_array_equal(
        feature_indices(tokens, grids, config), [-1, -1, *features, -1, 6, -1]
    )


def test_positions_of_text_alone_count_tokens(config):
    positions, after = prompt_positions(np.arange(4), np.zeros((0, 3), int), config)
    np.testing.assert_array_equal(positions, np.repeat(np.arange(4)[:, None], 3, axis=1))
    assert after == 4


def positions(config, *is_image):
    tokens = np.where(is_image, config.image_token_id, 5)
    prompt_positions(tokens, np.array([[1, 4, 6]]), config)


def pack(config, grid, num_patches):
    pack_images([np.zeros((24, 96))], [np.array([grid])], config.vision, num_patches)


REFUSED = {
    "too few tokens": (positions, (1,) * 5, "5 image tokens but grids"),
    "too many tokens": (positions, (1,) * 7, "7 image tokens but grids"),
    "interrupted": (positions, (1, 1, 1, 0, 1, 1, 1), "must be consecutive"),
    "no room": (pack, ((1, 4, 6), 16), "room for 16"),
    "another grid": (pack, ((1, 4, 5), 24), "got 24 patches"),
    "two frames": (pack, ((2, 4, 3), 24), "one frame"),
    "part of a block": (pack, ((1, 3, 8), 24), "multiples of merge_size 2"),
    "room for part of a block": (pack, ((1, 4, 6), 26), "multiple of merge_size"),
}


@pytest.mark.parametrize(("function", "arguments", "message"), REFUSED.values(), ids=REFUSED)
def test_images_that_do_not_fit_are_refused(config, function, arguments, message):
    with pytest.raises(ValueError, match=message):
        function(config, *arguments)


def test_coordinates_follow_merge_blocks(config):
    images = pack_images([np.zeros((16, 96))], [np.array([[1, 4, 4]])], config.vision, 16)
    expected = [(0, 0), (0, 1), (1, 0), (1, 1), (0, 2), (0, 3), (1, 2), (1, 3)]
    np.testing.assert_array_equal(images.coordinates[0, :8], expected)


sizes = st.lists(st.tuples(st.integers(1, 7), st.integers(1, 7)), max_size=6)


@pytest.mark.parametrize("family", ["qwen3_vl"], indirect=True)
def test_table_rows_and_shares_by_hand(config):
    """A 5 x 5 table stretched over 4 x 6 patches: a patch down is 4/3 cells, one across 4/5."""
    images = pack_images([np.zeros((24, 96))], [np.array([[1, 4, 6]])], config.vision, 28)
    place = images.coordinates[0].tolist()
    inner, corner = place.index([1, 1]), place.index([3, 5])
    np.testing.assert_array_equal(images.position_rows[0, inner], [5, 6, 10, 11])
    shares = np.outer([2 / 3, 1 / 3], [1 / 5, 4 / 5]).ravel()
    np.testing.assert_allclose(images.position_weights[0, inner], shares, atol=1e-6)
    assert images.position_weights[0, corner] @ images.position_rows[0, corner] == 24
    assert not images.position_weights[0, 24:].any()


@pytest.mark.parametrize("family", ["qwen3_vl"], indirect=True)
@settings(max_examples=50, deadline=None, derandomize=True)
@given(sizes=sizes)
def test_a_table_of_coordinates_gives_each_patch_its_place_in_its_image(config, sizes):
    grid = np.array([(1, 2 * h, 2 * w) for h, w in sizes], int).reshape(-1, 3)
    num = int(grid.prod(-1).sum())
    images = pack_images([np.zeros((num, 96))], [grid], config.vision, num + 4)
    table = np.stack(np.divmod(np.arange(25), 5), -1) / 4
    place = (images.position_weights[0][..., None] * table[images.position_rows[0]]).sum(1)
    last = grid[images.segments[0, :num], 1:] - 1
    np.testing.assert_allclose(place[:num], images.coordinates[0, :num] / last, atol=1e-6)
    assert images.windows is None


@pytest.mark.parametrize("family", ["qwen2_5_vl"], indirect=True)
def test_windows_are_consecutive_and_slots_point_at_their_blocks_by_hand(config):
    """An image of 3 x 5 merge blocks in windows of 2 x 2, after one of a single block."""
    grids = np.array([[1, 2, 2], [1, 6, 10]])
    first, *blocks = np.arange(16)[:, None] + np.array([0, 0.1, 0.2, 0.3])  # block.patch
    patches = np.concatenate([first, *blocks])[:, None]
    images = pack_images([patches], [grids], config.vision, 68)
    by_window = [[0, 1, 5, 6], [2, 3, 7, 8], [4, 9], [10, 11], [12, 13], [14]]
    expected = np.concatenate([first, *(blocks[n] for window in by_window for n in window)])
    np.testing.assert_array_equal(images.patches[0, :64, 0], expected)
    sizes = [4, *(4 * len(window) for window in by_window)]
    np.testing.assert_array_equal(images.windows[0], [*np.repeat(np.arange(7), sizes), *[-1] * 4])
    np.testing.assert_array_equal(images.segments[0], [*[0] * 4, *[1] * 60, *[-1] * 4])
    tokens = np.array([5, config.image_token_id, 6, *[config.image_token_id] * 15, 7])
    feature_index = feature_indices(tokens, grids, config)
    np.testing.assert_array_equal(feature_index[[0, 2, -1]], -1)
    assert feature_index[1] == 0
    np.testing.assert_array_equal(images.patches[0, 4 * feature_index[3:-1], 0], np.arange(1, 16))


@pytest.mark.parametrize("family", ["qwen2_5_vl"], indirect=True)
@settings(max_examples=50, deadline=None, derandomize=True)
@given(sizes=sizes)
def test_a_window_is_the_run_of_patches_of_a_square_of_one_image(config, sizes):
    grid = np.array([(1, 2 * h, 2 * w) for h, w in sizes], int).reshape(-1, 3)
    num = int(grid.prod(-1).sum())
    images = pack_images([np.zeros((num, 96))], [grid], config.vision, num + 4)
    assert images.position_rows is images.position_weights is None
    np.testing.assert_array_equal(images.windows[0, num:], -1)
    square = np.concatenate([images.segments[0][:, None], images.coordinates[0] // 4], axis=1)
    squares, windows = list(map(tuple, square[:num])), images.windows[0, :num].tolist()
    assert windows == sorted(windows)
    assert len(set(zip(squares, windows, strict=True))) == len(set(squares)) == len(set(windows))
