"""When prompts are admitted to slots, and a schedule of given lengths."""

import json

import numpy as np
import pytest

from care_jax.decoding import schedule as decode_schedule
from care_jax.decoding.schedule import Scheduler, Sizes, WaitingPrompt, widened
from care_jax.decoding.simulation import Simulation, simulate

BUCKETS = ((64, 16), (128, 16))


def sizes(num_slots=8, num_rows=2, num_rollouts=4, max_tokens=512, num_shards=1, period=16):
    return Sizes(num_slots, num_rows, num_rollouts, max_tokens, 0, num_shards, period)


def waiting(num_prompts):
    """Prompts whose lengths are in no order."""
    return [WaitingPrompt(10 + 37 * index % 50, index, 4) for index in range(num_prompts)]


def begun(prompts, sizes):
    scheduler = Scheduler(sizes)
    scheduler.begin(prompts)
    return scheduler


def release(scheduler, is_free, begun=4, lost=0):
    """Frees slots on whose prompts so many rollouts were begun; returns the slots."""
    is_free = np.asarray(is_free)
    return [slot for _, slot in scheduler.release(is_free, np.full(len(is_free), begun), lost)]


def num_idle(scheduler, is_free, unstarted=0):
    """Slots that waiting prompts, and that such numbers of rollouts of other slots could take."""
    left = np.where(is_free, 0, unstarted)
    return tuple(map(int, scheduler.refill.num_idle(np.asarray(is_free), left)))


def is_due(scheduler, is_free, unstarted=0, lost=(0, 0)):
    left = np.where(is_free, 0, unstarted)
    return bool(scheduler.refill.is_due(np.asarray(is_free), left, lost))


def admitted(scheduler):
    """Admits all prompts that can be now; returns their (slot, index)."""
    found = []
    while (admission := scheduler.admit()) is not None:
        prompts, source = admission
        slots = np.flatnonzero(source >= 0).tolist()
        given = [prompt.uid for prompt in prompts if prompt is not None]
        assert scheduler.uids[slots].tolist() == given
        found += zip(slots, given, strict=True)
    return found


def test_the_shortest_prompts_are_admitted_first_and_all_slots_are_taken():
    scheduler = begun(waiting(20), sizes())
    lengths = sorted(waiting(20))
    assert [index for _, index in admitted(scheduler)] == [prompt.uid for prompt in lengths[:8]]
    assert scheduler.admit() is None and not scheduler.is_over


@pytest.mark.parametrize("num_shards", [2, 4])
def test_a_prompt_is_decoded_on_the_shard_that_trains_it(num_shards):
    scheduler = begun(waiting(32), sizes(num_shards=num_shards))
    per_shard = 16 // num_shards
    seen = []
    while not scheduler.is_over:
        for slot, index in admitted(scheduler):
            assert slot // (8 // num_shards) == index % 16 // per_shard
            seen.append(index)
        release(scheduler, np.ones(8, bool))
    assert sorted(seen) == list(range(32))


def test_prompts_wait_until_a_prefill_is_worth_it():
    """A prefill has four prompts of up to 59 tokens, and costs 4 x 59 / 2 + 64 slot-steps."""
    scheduler = begun(waiting(100), sizes(64, period=100))
    admitted(scheduler)
    longest = sorted(waiting(100))[64].num_tokens
    cost = 4 * longest // 2 + 64
    one, four = np.arange(64) < 1, np.arange(64) < 4
    assert num_idle(scheduler, four, 1) == (4, 0)  # no rollouts are shared while prompts wait
    assert is_due(scheduler, four)
    assert not is_due(scheduler, one, lost=(cost - 1, 0)) and is_due(scheduler, one, lost=(cost, 0))
    assert release(scheduler, one, lost=cost - 1) == [0] and not admitted(scheduler)
    assert int(scheduler.refill.lost) == cost - 1
    release(scheduler, one, lost=cost)
    assert [slot for slot, _ in admitted(scheduler)] == [0]
    assert int(scheduler.refill.lost) == 0
    assert release(scheduler, four) == [0, 1, 2, 3]
    assert [slot for slot, _ in admitted(scheduler)] == [0, 1, 2, 3]


def test_the_last_prompts_are_admitted_at_once():
    scheduler = begun(waiting(65), sizes(64, period=65))
    admitted(scheduler)
    some = np.arange(64) < 1
    assert is_due(scheduler, some) and release(scheduler, some) == [0]
    assert [slot for slot, _ in admitted(scheduler)] == [0]
    assert num_idle(scheduler, some, 2) == (0, 1)  # it could take over a rollout
    assert not is_due(scheduler, some, 2, (0, 63)) and is_due(scheduler, some, 2, (0, 64))
    assert num_idle(scheduler, some) == (0, 0)  # nothing left to share
    assert not is_due(scheduler, np.arange(64) < 31) and is_due(scheduler, np.arange(64) < 32)
    release(scheduler, np.ones(64, bool))
    assert scheduler.is_over


def test_a_shard_is_refilled_and_halved_for_itself():
    """Of two shards with eight slots the first has a waiting prompt, the second none."""
    prompts = [WaitingPrompt(10, index, 4) for index in (*range(9), *range(16, 24))]
    scheduler = begun(prompts, sizes(16, num_shards=2, period=32))
    admitted(scheduler)
    first, second = np.arange(16) == 0, np.arange(16) >= 13
    assert num_idle(scheduler, first, 1) == (1, 0) and is_due(scheduler, first)
    assert num_idle(scheduler, second, 1) == (0, 3) and not is_due(scheduler, second)
    assert num_idle(scheduler, second) == (0, 0)
    scheduler = begun(prompts[1:], sizes(16, num_shards=2, period=32))
    admitted(scheduler)
    assert not is_due(scheduler, np.arange(16) < 8)  # the second shard still has eight
    assert is_due(scheduler, np.arange(16) % 8 < 4)


def test_a_shard_whose_prompts_wait_alone_is_not_kept_idle():
    """Of eight shards with two slots each the first has twelve prompts, the others one."""
    indices = *range(4), *range(32, 36), *range(64, 68), *range(4, 32, 4)
    prompts = [WaitingPrompt(8, index, 4) for index in indices]
    lengths = {index: np.full(1, 100 if index % 32 < 4 else 150) for index in indices}
    shape = sizes(16, num_rows=1, num_rollouts=1, num_shards=8, period=32)
    assert simulate(shape, prompts, lengths, BUCKETS).num_steps == 12 / 2 * 99


def steps_of(lengths, num_rows=2, **changes):
    lengths = {index: np.array(row) for index, row in enumerate(lengths)}
    shape = sizes(num_rows=num_rows, num_rollouts=len(lengths[0]), **changes)
    return simulate(shape, waiting(len(lengths)), lengths, BUCKETS)


def test_free_slots_take_over_what_was_not_begun():
    """Two prompts of nine rollouts on four slots of two rows: seven each are left to share."""
    scheduler = begun(waiting(2), sizes(4, num_rollouts=9))
    admitted(scheduler)
    assert num_idle(scheduler, [False, False, True, True], 7) == (0, 2)
    source, begin, end = scheduler.share().tolist()
    assert source == [-1, -1, 0, 1] and begin[2:] == [5, 5] and end == [5, 5, 9, 9]
    assert scheduler.uids.tolist() == [scheduler.uids[0], scheduler.uids[1]] * 2
    assert scheduler.share() is None
    assert int(scheduler.refill.num_free) == 4  # two prompts are left, in all four slots
    # The first slot is done; of the others the last has begun none beyond its two.
    released = scheduler.release(np.arange(4) == 0, np.array([5, 5, 8, 7]), 0)
    assert released == [(scheduler.uids[2], 0)]
    source, begin, end = scheduler.share().tolist()
    assert source == [3, -1, -1, -1] and begin[0] == 8 and end == [9, 5, 9, 8]


def test_a_slot_takes_over_from_one_that_holds_its_prompt_already():
    """Eleven more slots than prompts, of one row: new slots give up rollouts at once."""
    scheduler = begun(waiting(5), sizes(16, num_rows=1, num_rollouts=7))
    admitted(scheduler)
    before = scheduler.uids.copy()
    source, *_ = scheduler.share()
    assert (source[5:] >= 0).all() and (source[source >= 0] < 5).all()
    assert scheduler.uids[5:].tolist() == before[source[5:]].tolist()


def test_no_rollouts_are_shared_while_prompts_wait():
    scheduler = begun(waiting(40), sizes(16))
    admitted(scheduler)
    release(scheduler, np.arange(16) == 3, 2)
    assert scheduler.share() is None and scheduler.halve() is None


def test_rollouts_are_shared_inside_a_shard():
    prompts = [WaitingPrompt(10, index, 4) for index in (0, 1, 8)]  # two of the first shard's
    scheduler = begun(prompts, sizes(8, num_rollouts=9, num_shards=2))
    admitted(scheduler)
    source, indices = scheduler.share()[0].reshape(2, 4), scheduler.uids.reshape(2, 4)
    assert (source[0, 2:] >= 0).all() and (source[1, 1:] >= 0).all()
    assert set(indices[0]) == {0, 1} and set(indices[1]) == {8}


def test_half_of_the_slots_go_when_they_are_free_in_each_shard():
    scheduler = begun(waiting(16), sizes(16, num_shards=2))
    admitted(scheduler)
    release(scheduler, np.arange(16) % 8 < 4)
    kept = scheduler.halve()
    assert kept.tolist() == [4, 5, 6, 7] * 2
    assert (scheduler.uids >= 0).all() and len(scheduler.uids) == 8
    release(scheduler, [False, True, True, True, False, False, True, True])
    assert scheduler.halve().tolist() == [0, 1] * 2
    assert scheduler.uids[0] >= 0 and scheduler.uids[1] < 0
    release(scheduler, [False, False, True, True])
    assert scheduler.halve() is None  # a quarter of all stays


def steps(*lengths, **changes):
    return steps_of([list(lengths)], num_slots=1, **changes).num_steps


def test_rows_take_the_next_rollout_as_they_end():
    """Rows of 9 and 2 tokens; the second takes those of 5 and 6. First tokens need no step."""
    schedule = steps_of([[9, 2, 5, 6]], num_slots=1)
    assert schedule.num_steps == max(8, 1 + 4 + 5)
    assert sum(call.num_tokens for call in schedule.calls) == 22
    assert steps(9, 2, 5, 6, num_rows=4) == 8
    assert steps(9, 2, 5, 6, num_rows=1) == 8 + 1 + 4 + 5
    assert steps(1, 1, 1, 1) == 2  # one that ends at once still takes its turn


def test_a_slot_that_is_idle_when_a_call_begins_counts_from_its_first_step():
    """One of 32 slots is free from the second step on; a prefill of two costs 2 x 40 + 32."""
    prompts = [WaitingPrompt(40, index, 4) for index in range(34)]
    lengths = {index: np.array([400 if index else 3]) for index in range(34)}
    shape = sizes(32, num_rows=1, num_rollouts=1, period=34)
    schedule = simulate(shape, prompts, lengths, BUCKETS)
    assert [call.num_steps for call in schedule.calls[:2]] == [64, 2 * 40 + 32 - 63]


def test_shared_rollouts_are_each_decoded_once():
    lengths = np.random.default_rng(0).integers(1, 90, (11, 7)).tolist()
    for num_slots, num_rows in ((16, 2), (4, 2), (2, 1)):
        schedule = steps_of(lengths, num_rows=num_rows, num_slots=num_slots)
        assert sum(call.num_tokens for call in schedule.calls) == np.sum(lengths)


def test_a_call_ends_when_prompts_can_be_admitted():
    lengths = [[30] * 4] * 11
    for prompt in sorted(waiting(11))[:8]:
        lengths[prompt.uid] = [20] * 4
    schedule = steps_of(lengths, num_rows=4)
    assert [call.num_steps for call in schedule.calls] == [19, 29]
    assert [call.num_slots for call in schedule.calls] == [8, 4]
    assert sum(call.num_tokens for call in schedule.calls) == 4 * (8 * 20 + 3 * 30)
    assert len(schedule.prefills) == 8 + 3


def test_a_call_ends_once_as_much_is_idle_as_a_step_of_all_slots_has():
    """A prompt is done after 2 x 2 steps; the fourth and three more leave its slot of four idle."""
    schedule = steps_of([[3] * 4, [40] * 4, [40] * 4, [40] * 4], num_slots=4)
    assert schedule.calls[0].num_steps == 4 + 3
    assert sum(call.num_tokens for call in schedule.calls) == 4 * (3 + 3 * 40)


def test_long_answers_take_several_calls():
    schedule = steps_of([[200, 10, 10, 10]], num_rows=4, num_slots=1)
    assert [call.num_steps for call in schedule.calls] == [64, 64, 64, 7]


def test_prompts_of_a_larger_bucket_widen_the_slots():
    prompts = [WaitingPrompt(100, 0, 4), WaitingPrompt(20, 1, 4)]
    lengths = {0: np.array([5]), 1: np.array([90])}
    shape = sizes(num_slots=1, num_rollouts=1)
    schedule = simulate(shape, prompts, lengths, BUCKETS)
    assert schedule.prefills == ((64, 16), (128, 16))
    widths = [call.num_prompt_tokens for call in schedule.calls]
    assert widths == [64, 64, 128] and decode_schedule.NUM_STEPS == 64


def test_slots_are_widened_to_few_sizes():
    """Each is at least twice the last, up to the largest bucket, and in blocks of 256 tokens."""
    assert widened(0, 100, 2048) == 100 and widened(0, 576, 2048) == 768
    assert widened(768, 512, 2048) == 768 and widened(768, 770, 2048) == 1536
    assert widened(1536, 1600, 2000) == 2048 and widened(512, 1536, 2048) == 1536


def test_what_attention_reads_grows_by_a_token_a_step():
    """Four steps see 1 to 4 tokens, 89 steps 1 to 89; the prompts have 20 and 100 tokens."""
    prompts = [WaitingPrompt(100, 0, 4), WaitingPrompt(20, 1, 4)]
    lengths = {0: np.array([90]), 1: np.array([5])}
    schedule = simulate(sizes(num_slots=1, num_rows=1, num_rollouts=1), prompts, lengths, BUCKETS)
    short, *long = schedule.calls
    assert (short.prefix_tokens, short.suffix_tokens) == (4 * 20, 10)
    assert sum(call.prefix_tokens for call in long) == 89 * 100
    assert sum(call.suffix_tokens for call in long) == 89 * 90 // 2


def test_idle_rows_and_free_slots_attend_to_nothing_and_a_shared_slot_to_its_copy_of_the_prompt():
    prompts = [WaitingPrompt(10, 0, 4), WaitingPrompt(30, 1, 4)]
    lengths = {0: np.array([3, 2]), 1: np.array([3, 3])}
    (call,) = simulate(sizes(num_slots=2, num_rollouts=2), prompts, lengths, BUCKETS).calls
    assert (call.num_steps, call.prefix_tokens, call.num_active_slots) == (2, 2 * 40, 4)
    assert call.suffix_tokens == 3 * (1 + 2) + 1 and call.num_active_rows == 4 + 3
    lengths[0] = np.array([2, 2])
    calls = simulate(sizes(num_slots=2, num_rollouts=2), prompts, lengths, BUCKETS).calls
    assert sum(call.prefix_tokens for call in calls) == 40 + 30
    assert sum(call.num_active_slots for call in calls) == 3
    shared = simulate(sizes(num_slots=2), prompts[:1], {0: np.full(4, 3)}, BUCKETS)
    expected = [10 * call.num_slots * call.num_steps for call in shared.calls]
    assert [call.prefix_tokens for call in shared.calls] == expected
    assert expected[0] == 2 * 20


def whole(scheduler, *indices):
    """Ends all rollouts of some prompts in slots."""
    slots = np.isin(scheduler.uids, indices)
    scheduler.release(slots, np.full(len(slots), 4), 0)


def test_a_step_ends_once_enough_prompts_are_whole_and_the_next_goes_on():
    scheduler = Scheduler(sizes(), max_age=2)
    scheduler.begin(waiting(6), num_wanted=3)
    admitted(scheduler)
    assert int(scheduler.refill.num_free) == 2 + 3
    whole(scheduler, 4, 1)
    assert sorted(scheduler.chosen) == [1, 4]
    assert not scheduler.is_over and int(scheduler.refill.num_free) == 4 + 1
    whole(scheduler, 0, 5)
    assert scheduler.is_over and len(scheduler.chosen) == 3 and len(scheduler.spare) == 1
    (spare,) = scheduler.spare
    scheduler.begin([WaitingPrompt(9, 16, 4)], num_wanted=2)
    assert scheduler.chosen == [spare] and not scheduler.is_over
    admitted(scheduler)
    assert sorted(i for i in scheduler.uids if i >= 0) == [2, 3, 16]
    whole(scheduler, 16)
    assert scheduler.is_over and scheduler.has_prompts
    scheduler.begin([])
    whole(scheduler, 2, 3)
    assert scheduler.is_over and not scheduler.has_prompts


def test_a_step_waits_for_prompts_that_were_carried_over_too_often():
    """And keeps their places: younger ones that are whole sooner count for the next step."""
    scheduler = Scheduler(sizes(), max_age=1)
    scheduler.begin(waiting(4), num_wanted=2)
    admitted(scheduler)
    whole(scheduler, 0, 1)
    assert scheduler.is_over
    scheduler.grow_older()
    scheduler.begin([WaitingPrompt(9, index, 4) for index in (16, 17, 18)], num_wanted=3)
    admitted(scheduler)
    whole(scheduler, 16)
    whole(scheduler, 17)
    assert scheduler.chosen == [16] and scheduler.spare == [17]
    whole(scheduler, 2)
    assert not scheduler.is_over
    whole(scheduler, 3)
    assert scheduler.is_over and scheduler.chosen == [16, 2, 3]


def test_slots_between_two_steps_are_as_few_as_hold_the_prompts():
    scheduler = Scheduler(sizes(num_shards=2, period=8), max_age=1)
    scheduler.begin(waiting(8), num_wanted=3)
    admitted(scheduler)
    whole(scheduler, 0, 1, 2, 4, 5)
    before = scheduler.uids.copy()
    kept = scheduler.compact()
    assert kept.shape == (4,)  # two of each shard, one of the first is free
    moved = before.reshape(2, 4)[[[0], [1]], kept.reshape(2, 2)].ravel()
    assert scheduler.uids.tolist() == moved.tolist()
    assert {3, 6, 7} == {index for index in moved if index >= 0}
    restored = Scheduler(scheduler._sizes, max_age=1)
    restored.restore(json.loads(json.dumps(scheduler.saved())))
    for each in scheduler, restored:
        widened = each.widen()
        assert widened.reshape(2, 4).tolist() == [[0, 1, -1, -1]] * 2
        assert each.uids[widened >= 0].tolist() == moved.tolist()
        assert (each.uids[widened < 0] == -1).all() and each.widen() is None
        each.begin([WaitingPrompt(9, each.next_uid, 4)], num_wanted=3)
        assert each.chosen == scheduler.chosen and len(each.chosen) == 2
        assert [index for _, index in admitted(each)] == [8]


def test_steps_that_carry_over_need_fewer_decode_steps():
    """Per token, of drawn lengths, after the first step."""
    rng = np.random.default_rng(0)
    lengths = dict(enumerate(rng.geometric(1 / 60, (80, 4)).clip(max=512)))

    def steps_per_token(num_more):
        simulation, calls = Simulation(sizes(period=16), BUCKETS, max_age=2), []
        simulation.step(waiting(16 + num_more), lengths, 16)
        for first in (32, 48, 64):
            prompts = [WaitingPrompt(20, index, 4) for index in range(first, first + 16)]
            calls += simulation.step(prompts, lengths, 16).calls
            assert len(simulation.scheduler.chosen) == 16
        return sum(call.num_steps for call in calls) / sum(call.num_tokens for call in calls)

    assert steps_per_token(8) < 0.9 * steps_per_token(0)
