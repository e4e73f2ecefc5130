"""Who sits down when, and a schedule of given lengths."""

import numpy as np
import pytest

from care_jax.decoding import schedule as decode_schedule
from care_jax.decoding.schedule import Line, Sizes, Waiting, simulate

BUCKETS = ((64, 16), (128, 16))


def sizes(num_seats=8, num_rows=2, num_rollouts=4, max_tokens=512, num_shards=1, period=16):
    return Sizes(num_seats, num_rows, num_rollouts, max_tokens, 0, num_shards, period)


def everyone(num_prompts):
    """Prompts whose lengths are in no order."""
    return [Waiting(10 + 37 * place % 50, place, 4) for place in range(num_prompts)]


def leave(line, is_free, begun=4):
    """Seats get free, in whose prompts so many rollouts were begun; returns the seats."""
    is_free = np.asarray(is_free)
    return [seat for _, seat in line.leave(is_free, np.full(len(is_free), begun))]


def seated(line):
    """Everybody who can sit down now, as (seat, place)."""
    found = []
    while (newcomers := line.next_newcomers()) is not None:
        found += [
            (int(seat), prompt.place)
            for seat, prompt in zip(newcomers.seats, newcomers.prompts, strict=True)
            if prompt is not None
        ]
    return found


def test_the_shortest_sit_down_first_and_all_seats_are_taken():
    line = Line(everyone(20), sizes())
    lengths = sorted(everyone(20))
    assert [place for _, place in seated(line)] == [prompt.place for prompt in lengths[:8]]
    assert line.next_newcomers() is None and line.is_anyone_left


@pytest.mark.parametrize("num_shards", [2, 4])
def test_a_prompt_sits_on_the_shard_that_trains_it(num_shards):
    line = Line(everyone(32), sizes(num_shards=num_shards))
    per_shard = 16 // num_shards
    seen = []
    while line.is_anyone_left:
        for seat, place in seated(line):
            assert seat // (8 // num_shards) == place % 16 // per_shard
            seen.append(place)
        leave(line, np.ones(8, bool))
    assert sorted(seen) == list(range(32))


def test_newcomers_wait_until_a_prefill_is_worth_it():
    """Two sit down at a time, so one is worth it; of 16 seats four do, so two are."""
    for num_seats, few, enough in ((8, 0, 1), (16, 1, 2)):
        line = Line(everyone(40), sizes(num_seats))
        seated(line)
        assert line.num_wanted == enough
        is_free = np.zeros(num_seats, bool)
        is_free[:few] = True
        assert leave(line, is_free) == list(range(few))
        assert not seated(line) and line.num_wanted == enough
        is_free[:enough] = True
        leave(line, is_free)
        assert [seat for seat, _ in seated(line)] == list(range(enough))


def test_the_last_ones_wait_for_nobody():
    line = Line(everyone(17), sizes(16))
    seated(line)
    assert line.num_wanted == 1
    assert leave(line, np.arange(16) == 5) == [5]
    assert [seat for seat, _ in seated(line)] == [5]
    assert line.num_wanted == 1  # who sat down has two rollouts that were not begun
    leave(line, np.zeros(16, bool))
    assert line.num_wanted == 8  # nothing left to share: half of the seats could go
    leave(line, np.ones(16, bool))
    assert not line.is_anyone_left


def test_rings_double_up_to_the_longest_answer():
    assert sizes(max_tokens=2048).rings == (512, 1024, 2048)
    assert sizes(max_tokens=36).rings == (36,) and sizes(max_tokens=300).rings == (150, 300)
    assert [sizes().ring_for(n) for n in (0, 64, 65, 300, 511)] == [128, 128, 256, 512, 512]


def steps_of(lengths, num_rows=2, **changes):
    lengths = {place: np.array(row) for place, row in enumerate(lengths)}
    shape = sizes(num_rows=num_rows, num_rollouts=len(lengths[0]), **changes)
    return simulate(shape, everyone(len(lengths)), lengths, BUCKETS)


def test_free_seats_take_over_what_was_not_begun():
    """Two prompts of nine rollouts on four seats of two rows: seven each are left to share."""
    line = Line(everyone(2), sizes(4, num_rollouts=9))
    seated(line)
    assert line.num_wanted == 3
    shares = line.next_shares()
    assert shares.source.tolist() == [-1, -1, 0, 1] and shares.begin.tolist()[2:] == [5, 5]
    assert shares.end.tolist() == [5, 5, 9, 9]
    assert line.who.tolist() == [line.who[0], line.who[1]] * 2
    assert line.next_shares() is None
    # The first seat is done; of the others the last has begun none beyond its two.
    left = line.leave(np.array([True, False, False, False]), np.array([5, 5, 8, 7]))
    assert left == [(line.who[2], 0)]
    shares = line.next_shares()
    assert shares.source.tolist() == [3, -1, -1, -1]
    assert (shares.begin[0], shares.end.tolist()) == (8, [9, 5, 9, 8])


def test_nobody_shares_while_others_wait():
    line = Line(everyone(40), sizes(16))
    seated(line)
    line.leave(np.arange(16) == 3, np.full(16, 2))
    assert line.next_shares() is None and line.next_half() is None


def test_rollouts_are_shared_inside_a_shard():
    prompts = [Waiting(10, place, 4) for place in (0, 1, 8)]  # two of the first shard's
    line = Line(prompts, sizes(8, num_rollouts=9, num_shards=2))
    seated(line)
    shares = line.next_shares()
    source, who = shares.source.reshape(2, 4), line.who.reshape(2, 4)
    assert (source[0, 2:] >= 0).all() and (source[1, 1:] >= 0).all()
    assert set(who[0]) == {0, 1} and set(who[1]) == {8}


def test_half_of_the_seats_go_when_they_are_free_in_each_shard():
    line = Line(everyone(16), sizes(16, num_shards=2))
    seated(line)
    leave(line, np.arange(16) % 8 < 4)
    kept = line.next_half()
    assert kept.tolist() == [4, 5, 6, 7] * 2 and (line.who >= 0).all() and len(line.who) == 8
    leave(line, [False, True, True, True, False, False, True, True])
    assert line.next_half().tolist() == [0, 1] * 2
    assert line.who[0] >= 0 and line.who[1] < 0
    leave(line, [False, False, True, True])
    assert line.next_half() is None  # a quarter of all stays


def steps(*lengths, **changes):
    return steps_of([list(lengths)], num_seats=1, **changes).num_steps


def test_rows_take_the_next_rollout_as_they_end():
    """Rows of 9 and 2 tokens; the second takes those of 5 and 6. First tokens need no step."""
    schedule = steps_of([[9, 2, 5, 6]], num_seats=1)
    assert schedule.num_steps == max(8, 1 + 4 + 5)
    assert sum(call.num_tokens for call in schedule.calls) == 22
    assert steps(9, 2, 5, 6, num_rows=4) == 8
    assert steps(9, 2, 5, 6, num_rows=1) == 8 + 1 + 4 + 5
    assert steps(1, 1, 1, 1) == 2  # one that ends at once still takes its turn


def test_shared_rollouts_are_each_decoded_once():
    lengths = np.random.default_rng(0).integers(1, 90, (11, 7)).tolist()
    for num_seats, num_rows in ((16, 2), (4, 2), (2, 1)):
        schedule = steps_of(lengths, num_rows=num_rows, num_seats=num_seats)
        assert sum(call.num_tokens for call in schedule.calls) == np.sum(lengths)


def test_a_call_ends_when_somebody_should_sit_down():
    lengths = [[30] * 4] * 11
    for prompt in sorted(everyone(11))[:8]:
        lengths[prompt.place] = [20] * 4
    schedule = steps_of(lengths, num_rows=4)
    assert [call.num_steps for call in schedule.calls] == [19, 29]
    assert [call.num_seats for call in schedule.calls] == [8, 4]
    assert sum(call.num_tokens for call in schedule.calls) == 4 * (8 * 20 + 3 * 30)
    assert len(schedule.prefills) == 4 + 2


def test_long_answers_take_several_calls_and_larger_rings():
    schedule = steps_of([[200, 10, 10, 10]], num_rows=4, num_seats=1)
    assert [call.num_steps for call in schedule.calls] == [64, 64, 64, 7]
    assert [call.num_slots for call in schedule.calls] == [128, 128, 256, 256]


def test_prompts_of_a_larger_bucket_widen_the_seats():
    prompts = [Waiting(100, 0, 4), Waiting(20, 1, 4)]
    lengths = {0: np.array([5]), 1: np.array([90])}
    shape = sizes(num_seats=1, num_rollouts=1)
    schedule = simulate(shape, prompts, lengths, BUCKETS)
    assert schedule.prefills == ((64, 16), (128, 16))
    widths = [call.num_prompt_tokens for call in schedule.calls]
    assert widths == [64, 64, 128] and decode_schedule.NUM_STEPS == 64
