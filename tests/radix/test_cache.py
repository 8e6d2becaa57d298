"""The cache's transactions: admission, look-ups between chunks, growth, entering, letting go."""

import pytest

from repertory.protocol.ids import BlockId, SequenceId
from repertory.protocol.messages import BlockCopy
from repertory.protocol.outputs import BlockCounts
from repertory.radix.cache import Advance, KVCache
from repertory.radix.tokens import TokenLog
from repertory.tests.radix.drive import Driver, snapshot

# ---- admission ----------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [3, 4, 5, 7, 8, 9, 11, 12, 13])
def test_a_full_prompt_hit_still_leaves_the_last_token_to_compute(length):
    drive = Driver()
    drive.remember([*range(length), 99])
    again = drive.start(range(length))
    advance = drive.look_up(again)
    assert again.num_computed == length - 1
    assert not advance.must_wait
    longer = drive.start([*range(length), 50, 51, 52])
    assert longer.num_computed == length // 4 * 4


def test_admission_shares_the_cached_blocks_and_promises_the_rest():
    drive = Driver(num_blocks=8)
    blocks = drive.remember(range(8))
    seq = drive.start([*range(8), 1, 2, 3, 4, 5])
    assert seq.table == blocks
    assert (seq.num_computed, seq.holding.reserved) == (8, 2)
    assert drive.cache.num_available == 8 - 2 - 2


def test_a_failed_admission_leaves_no_trace():
    drive = Driver(num_blocks=6)
    cached = drive.remember([1, 1, 1, 1])
    runner = drive.serve([2] * 15)
    hopeless = drive.open([*[1] * 4, *[3] * 13])
    before = snapshot(drive.cache)
    for _ in range(3):
        assert drive.admit(hopeless) is None
        assert snapshot(drive.cache) == before
    assert (hopeless.table, hopeless.holding.node) == ([], None)
    assert drive.cache.tree.evict(1) == 1, "the cached block stays evictable"
    assert drive.cache.pool.hand(cached[0]) == 0
    drive.close(runner, hopeless)


def test_a_failed_admission_into_a_new_namespace_leaves_no_namespace():
    drive = Driver(num_blocks=2)
    seq = drive.open(range(12), "new salt")
    before = snapshot(drive.cache)
    assert drive.admit(seq) is None
    assert snapshot(drive.cache) == before
    assert drive.cache.tree.namespaces() == []


def test_a_failed_admission_that_ends_inside_a_run_does_not_split_it():
    drive = Driver(num_blocks=6)
    drive.remember(range(16))
    before = snapshot(drive.cache)
    seq = drive.open([*range(8), *[9] * 20])
    assert drive.admit(seq) is None
    drive.cache.close(seq.holding)
    assert snapshot(drive.cache) == before


def test_blocks_found_in_the_cache_are_not_counted_as_room_for_the_rest():
    drive = Driver(num_blocks=4)
    drive.remember(range(16))
    assert drive.cache.num_available == 4
    assert drive.admit(drive.open([*range(8), *[9] * 8])) == 8
    assert drive.admit(drive.open([*range(8), *[7] * 4])) is None


@pytest.mark.parametrize(("spare", "fits"), [(0, True), (5, True), (6, False)])
def test_admission_keeps_the_spare_blocks_it_was_asked_to_keep(spare, fits):
    drive = Driver(num_blocks=8)
    assert (drive.admit(drive.open(range(9)), spare=spare) is not None) == fits


def test_a_lookup_says_what_admission_would_find_and_changes_nothing():
    drive = Driver()
    drive.remember(range(10))
    before = snapshot(drive.cache)
    assert drive.cache.lookup("shared", TokenLog(range(10))) == 8
    assert drive.cache.lookup("shared", TokenLog(range(8))) == 4
    assert drive.cache.lookup("another", TokenLog(range(8))) == 0
    assert snapshot(drive.cache) == before


def test_a_sequence_is_not_admitted_twice_nor_opened_twice():
    drive = Driver()
    seq = drive.start([1, 2])
    with pytest.raises(AssertionError, match="admitted twice"):
        drive.cache.admit(seq.holding, seq.log)
    with pytest.raises(AssertionError, match="opened twice"):
        drive.cache.open(SequenceId(1), "shared")


@pytest.mark.parametrize("block_size", [1, 2, 4, 16])
def test_a_prompt_of_one_token_finds_nothing_and_needs_one_block(block_size):
    drive = Driver(block_size=block_size)
    drive.remember([5] * (2 * block_size))
    seq = drive.start([5])
    assert drive.look_up(seq) == Advance(0, None, False)
    assert seq.holding.reserved == 1


# ---- looking up again ---------------------------------------------------------------------------


def test_what_another_entered_between_two_chunks_is_taken_and_not_computed():
    drive = Driver()
    slow, quick = drive.start(range(16)), drive.start(range(14))
    drive.begin()
    drive.chunk(slow, 4)
    drive.chunk(quick)
    drive.begin()
    advance = drive.look_up(slow)
    assert advance.num_computed == 12
    assert slow.table == quick.table[:3]
    assert slow.holding.reserved == 1


def test_rows_of_one_step_share_what_one_of_them_computes():
    drive = Driver()
    seqs = [drive.start(range(9)) for _ in range(4)]
    drive.begin()
    for seq in seqs:
        assert not drive.chunk(seq).must_wait
    assert len({tuple(seq.table[:2]) for seq in seqs}) == 1
    assert len({seq.table[2] for seq in seqs}) == 4
    assert drive.cache.counts() == BlockCounts(total=16, free=10, cached=0, referenced=6)


def test_own_blocks_are_given_back_for_the_trees_and_the_device_is_told():
    drive = Driver()
    twin, seq = drive.start(range(8)), drive.start(range(12))
    drive.begin()
    drive.chunk(twin)
    drive.compute(seq, 6)  # as if both had been planned blind: the first block is a duplicate
    seq.holding.mark_sent()
    assert seq.holding.num_tree_blocks == 0
    mine = list(seq.table)
    drive.begin()
    drive.look_up(seq)
    assert seq.table == twin.table
    assert seq.num_computed == 8
    assert seq.holding.take_edits() == [(0, [twin.table[0]]), (1, [twin.table[1]])]
    assert all(drive.cache.pool.hand(block) == 0 for block in mine)


def test_a_partly_matching_block_is_copied_and_its_tokens_kept():
    drive = Driver()
    blocks = drive.remember(range(8))
    seq = drive.start([0, 1, 2, 3, 4, 5, 70, 71, 72])
    drive.begin()
    advance = drive.look_up(seq)
    assert advance == Advance(6, BlockCopy(blocks[1], seq.table[1], 2), False)
    assert seq.table[1] != blocks[1]
    assert seq.holding.num_tree_blocks == 1


def test_a_copy_goes_into_the_block_that_is_already_partly_computed():
    drive = Driver()
    seq = drive.start([0, 1, 2, 3, 70])
    drive.begin()
    drive.compute(seq, 1)
    mine = list(seq.table)
    drive.begin()
    blocks = drive.remember([0, 1, 2, 9, 9])
    advance = drive.look_up(seq)
    assert advance == Advance(3, BlockCopy(blocks[0], BlockId(mine[0]), 3), False)
    assert seq.table == mine


def test_fewer_matching_tokens_than_are_computed_are_not_copied():
    drive = Driver()
    seq = drive.start([0, 1, 2, 3, 70])
    drive.begin()
    drive.compute(seq, 2)
    drive.begin()
    drive.remember([0, 1, 9, 9, 9])
    assert drive.look_up(seq) == Advance(2, None, False)


def test_a_block_that_this_step_writes_may_be_waited_for_and_is_copied_in_the_next():
    drive = Driver()
    writer, reader = drive.start([1, 2, 3, 4, 5]), drive.start([1, 2, 9, 9, 9])
    drive.begin()
    drive.chunk(writer)
    assert drive.look_up(reader) == Advance(0, None, must_wait=False, may_wait=True)
    assert reader.table == []
    drive.sample(writer, 50)
    drive.begin()
    assert drive.look_up(reader) == Advance(2, BlockCopy(writer.table[0], reader.table[0], 2), False)


def test_a_block_over_which_no_token_was_drawn_yet_is_not_copied():
    drive = Driver()
    writer, reader = drive.start([1, 2, 3, 4, 5]), drive.start([1, 2, 9, 9, 9])
    drive.begin()
    drive.chunk(writer)
    drive.begin()
    assert drive.look_up(reader) == Advance(0, None, False)


def test_a_block_that_a_row_of_this_step_fills_only_partly_is_waited_for():
    drive = Driver()
    writer, reader = drive.start(range(9)), drive.start([*range(8), 60])
    drive.begin()
    drive.chunk(writer, 6)
    assert drive.look_up(reader) == Advance(4, None, must_wait=True)
    drive.begin()
    assert drive.look_up(reader) == Advance(4, None, False), "nobody fills it in this step"


def test_a_partly_filled_block_is_waited_for_though_its_node_is_split_in_the_same_step():
    drive = Driver()
    writer, splitter = drive.start(range(13)), drive.start([0, 1, 2, 3, 50, 50, 50, 50, 50])
    twin = drive.start(range(13))
    drive.begin()
    drive.chunk(writer, 10)
    drive.chunk(splitter)
    assert drive.look_up(twin) == Advance(8, None, True)


def test_a_block_being_filled_is_waited_for_though_part_of_another_could_be_copied_later():
    drive = Driver()
    prompt = [0, 1, 2, 3, 4, 5, 6, 7, 8]
    filler, cousin, twin = drive.start(prompt), drive.start([*range(5), 90, 91, 92, 93]), drive.start(prompt)
    drive.begin()
    drive.chunk(filler, 6)
    drive.compute(cousin)
    assert drive.look_up(twin) == Advance(4, None, must_wait=True)


def test_a_copy_is_not_made_of_a_block_that_will_be_there_whole_in_the_next_step():
    drive = Driver()
    drive.remember([*range(5), 90, 91, 92])
    filler, twin = drive.start(range(9)), drive.start(range(10))
    drive.begin()
    drive.chunk(filler, 2)
    assert drive.look_up(twin) == Advance(4, None, must_wait=True)
    assert len(twin.table) == 1


def test_a_row_that_goes_on_in_its_own_step_makes_nobody_wait_for_what_it_has_finished():
    drive = Driver(block_size=2)
    writer, other = drive.start([1, 2, 1, 2, 1, 2, 9, 9]), drive.start([1, 2, 1, 2, 1, 2, 1, 7, 7])
    drive.begin()
    drive.compute(writer, 2)
    drive.compute(writer, 1)  # in the middle of the second block
    drive.compute(writer, 3)  # and on to the end of the third
    assert drive.look_up(other) == Advance(6, None, must_wait=False)


@pytest.mark.parametrize("prompt", [[*range(7), 60, 61, 62], range(8), range(6)])
def test_a_block_being_filled_that_can_only_be_copied_need_not_be_waited_for(prompt):
    drive = Driver()
    writer, reader = drive.start(range(9)), drive.start(prompt)
    drive.begin()
    drive.chunk(writer, 6)
    assert drive.look_up(reader) == Advance(4, None, must_wait=False, may_wait=True)


def test_a_stranger_does_not_wait_for_a_block_that_is_being_filled():
    drive = Driver()
    writer, stranger = drive.start(range(9)), drive.start([0, 1, 2, 3, 60, 61])
    drive.begin()
    drive.chunk(writer, 6)
    assert drive.look_up(stranger) == Advance(4, None, False)


def test_a_row_does_not_wait_for_its_last_token_which_it_must_compute_anyway():
    drive = Driver()
    writer, twin = drive.start(range(9)), drive.start(range(5))
    drive.begin()
    drive.chunk(writer, 6)
    assert drive.look_up(twin) == Advance(4, None, must_wait=False)


def test_the_block_that_holds_the_last_tokens_of_a_log_is_not_waited_for():
    drive = Driver()
    short, twin = drive.start(range(6)), drive.start(range(6))
    drive.begin()
    drive.chunk(short)
    assert drive.look_up(twin) == Advance(4, None, False)


def test_a_copy_whose_source_is_evicted_for_its_own_target_is_no_copy_at_all():
    drive = Driver(num_blocks=3)
    blocks = drive.remember(range(4))
    holder = drive.start([7] * 5)
    drive.begin()
    drive.compute(holder)
    seq = drive.start([0, 1, 2, 50])
    advance = drive.look_up(seq)
    assert seq.table == blocks
    assert advance == Advance(3, None, False)
    assert drive.found([0, 1, 2, 3]) == 0


def test_looking_up_never_makes_less_of_what_is_available():
    drive = Driver(num_blocks=8)
    drive.remember(range(16))
    seq, other = drive.start([*range(4), 9, 9, 9, 9, 9]), drive.start(range(15))
    drive.begin()
    before = drive.cache.num_available
    for each in (seq, other):
        drive.look_up(each)
        assert drive.cache.num_available >= before


# ---- growing and promises -----------------------------------------------------------------------


def test_a_promised_prefill_grows_whatever_the_others_take():
    drive = Driver(num_blocks=8)
    drive.remember([5] * 12)
    late = drive.start([1] * 16)
    greedy = drive.start([2] * 3)
    drive.begin()
    drive.compute(greedy)
    while drive.cache.grow(greedy.holding, len(greedy.table) * 4 + 1):
        drive.sound()
    assert len(greedy.table) == 4
    assert drive.admit(drive.open([3])) is None
    for _ in range(4):
        drive.begin()
        drive.chunk(late, 4)


def test_growth_past_what_is_available_changes_nothing():
    drive = Driver(num_blocks=4)
    drive.remember([5] * 8)
    seq = drive.start([1] * 4)
    drive.start([2] * 4)
    before = snapshot(drive.cache)
    assert not drive.cache.grow(seq.holding, 13)
    assert snapshot(drive.cache) == before
    assert drive.cache.grow(seq.holding, 12)


def test_growth_evicts_no_more_than_it_needs():
    drive = Driver(num_blocks=4)
    cached = drive.remember(range(12))
    seq = drive.start([9] * 5)
    drive.begin()
    drive.compute(seq)
    assert drive.found(range(12)) == 8
    assert cached[2] in seq.table


def test_a_table_that_is_long_enough_does_not_grow():
    drive = Driver()
    seq = drive.serve(range(5))
    before = snapshot(drive.cache)
    assert drive.cache.grow(seq.holding, 8)
    assert snapshot(drive.cache) == before


def test_a_sequence_released_before_its_first_chunk_gives_back_promise_and_locks():
    drive = Driver(num_blocks=8)
    drive.remember(range(8))
    seq = drive.start([*range(8), *[4] * 12])
    assert drive.cache.num_available == 3
    drive.release(seq)
    assert drive.cache.num_available == 8
    assert drive.cache.counts() == BlockCounts(total=8, free=6, cached=2, referenced=0)


def test_what_releasing_would_free_is_what_releasing_frees():
    drive = Driver(num_blocks=16)
    first = drive.serve(range(10))
    second = drive.serve([*range(8), *[7] * 9])
    third = drive.start([*range(4), *[3] * 8])
    for seq in (second, third, first):
        before = drive.cache.num_available
        expected = drive.cache.num_freed_by(seq.holding)
        drive.release(seq)
        assert drive.cache.num_available == before + expected


# ---- entering -----------------------------------------------------------------------------------


def test_only_blocks_whose_tokens_are_all_known_enter():
    drive = Driver()
    seq = drive.serve(range(7))
    drive.begin()
    assert drive.cache.grow(seq.holding, 9)
    drive.cache.enter(seq.holding, TokenLog(range(7)), 7, 8)  # position 7 is a token still in flight
    drive.sound()
    assert seq.holding.num_tree_blocks == 1
    drive.begin()
    drive.cache.enter(seq.holding, TokenLog(range(8)), 8, 9)
    drive.sound()
    assert seq.holding.num_tree_blocks == 2


def test_a_duplicate_stays_private_in_its_own_step_and_is_freed_at_the_next_block():
    drive = Driver()
    first, second = drive.serve([1, 2, 3]), drive.serve([1, 2, 3])
    drive.begin()
    for seq in (first, second):
        drive.compute(seq, 1)  # both complete the block 1, 2, 3, 99 in this step
    duplicate = second.table[0]
    assert (first.holding.num_tree_blocks, second.holding.num_tree_blocks) == (1, 0)
    assert first.table != second.table
    second.holding.mark_sent()
    for token in (4, 5, 6, 7):
        drive.sample(second, token)
        drive.begin()
        drive.compute(second, 1)
    assert second.holding.num_tree_blocks == 2
    assert second.table[0] == first.table[0]
    assert second.holding.take_edits()[0] == (0, [first.table[0]])
    assert drive.cache.pool.hand(duplicate) == 0


def test_a_row_that_computes_twice_in_a_step_keeps_the_blocks_this_step_writes():
    drive = Driver()
    first, second = drive.serve([1, 2, 3]), drive.start([1, 2, 3, 99, 5, 6, 7, 8, 9])
    drive.begin()
    drive.compute(first, 1)
    drive.compute(second, 4)
    duplicate = second.table[0]
    drive.compute(second, 4)
    assert second.table[0] == duplicate != first.table[0]
    drive.begin()
    drive.compute(second, 1)
    assert second.holding.num_tree_blocks == 2
    assert second.table[0] == first.table[0]


def test_a_duplicate_in_the_middle_is_switched_and_what_follows_enters_behind_it():
    drive = Driver()
    whole = drive.serve([1, 2, 3, 4, 5, 6, 7, 8])
    other = drive.open([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13])
    other.holding.namespace = "aside"  # computed where nobody could see, then compared with the crowd
    assert drive.admit(other) == 0
    drive.begin()
    assert drive.cache.grow(other.holding, 13)
    drive.begin()
    assert other.table[0] not in whole.table
    drive.compute(other)
    assert other.holding.num_tree_blocks == 3


def test_a_row_that_would_write_into_the_trees_block_is_caught():
    drive = Driver()
    seq = drive.serve(range(9))
    with pytest.raises(AssertionError, match="write into a block of the tree"):
        drive.cache.enter(seq.holding, seq.log, 7, 10)


def test_in_place_growth_survives_someone_elses_lock_in_the_middle():
    drive = Driver()
    grower = drive.serve(range(9))
    guest = drive.start([*range(4), 60, 61])
    for token in range(20):
        drive.decode(grower, token)
    assert grower.table[0] == guest.table[0]
    assert drive.found(grower.log.tolist()[:28]) == 28
    drive.close(grower)
    assert drive.found([*range(8)]) == 8
    drive.close(guest)


@pytest.mark.parametrize("extreme", [0, 2**31 - 1])
@pytest.mark.parametrize("block_size", [1, 3, 4])
def test_extreme_token_ids_are_found_again(extreme, block_size):
    drive = Driver(block_size=block_size)
    tokens = [extreme] * 7
    drive.remember(tokens)
    assert drive.found(tokens) == 7 // block_size * block_size
    assert drive.found([extreme ^ 1] * 7) == 0


# ---- letting go ---------------------------------------------------------------------------------


def test_a_preempted_sequence_finds_its_own_full_blocks_again():
    drive = Driver()
    seq = drive.serve(range(10))
    table = list(seq.shared)
    drive.release(seq)
    assert (seq.table, seq.holding.num_sent, seq.holding.changed) == ([], 0, [])
    assert drive.admit(seq) == 8
    assert seq.table == table


def test_releasing_twice_or_before_admission_is_harmless():
    drive = Driver()
    seq = drive.open([1, 2])
    before = snapshot(drive.cache)
    drive.release(seq)
    drive.release(seq)
    assert snapshot(drive.cache) == before


def test_counts_always_add_up_to_the_pool():
    drive = Driver(num_blocks=8)
    drive.remember(range(8))
    drive.serve([5] * 6)
    assert drive.cache.counts() == BlockCounts(total=8, free=4, cached=2, referenced=2)


def test_a_reset_forgets_what_nobody_holds_and_keeps_what_is_held():
    drive = Driver()
    drive.remember([8] * 8, "salted")
    seq = drive.serve(range(9))
    guest = drive.serve([*range(4), *[6] * 5])
    drive.close(guest)
    drive.cache.reset()
    drive.sound()
    assert drive.found([8] * 8, "salted") == 0
    assert drive.found([*range(4), *[6] * 4]) == 4
    assert drive.cache.counts().cached == 0
    assert drive.cache.tree.namespaces() == ["shared"]
    drive.close(seq)
    drive.cache.reset()
    assert drive.cache.counts() == BlockCounts(total=16, free=16, cached=0, referenced=0)
    assert drive.cache.tree.namespaces() == []


def test_many_salts_leave_no_trace_once_their_blocks_are_evicted():
    drive = Driver(num_blocks=4)
    for salt in range(50):
        drive.remember([1] * 8, salt)
    assert len(drive.cache.tree.namespaces()) <= 2


def test_a_closed_sequence_is_unknown_and_its_blocks_are_cache():
    drive = Driver()
    seq = drive.serve(range(8))
    drive.close(seq)
    assert list(drive.cache.holdings()) == []
    assert drive.found(range(8)) == 8


# ---- other settings -----------------------------------------------------------------------------


def test_without_prefix_caching_nobody_finds_anothers_blocks_and_the_end_frees_everything():
    drive = Driver(enable_prefix_caching=False)
    first = drive.serve(range(9))
    second = drive.start(range(9))
    assert second.num_computed == 0
    drive.begin()
    assert drive.look_up(second) == Advance(0, None, False)
    drive.close(first, second)
    assert drive.cache.counts().free == 16
    assert drive.cache.tree.namespaces() == []


def test_without_prefix_caching_a_preempted_sequence_still_finds_its_own_blocks():
    drive = Driver(enable_prefix_caching=False)
    seq = drive.serve(range(10))
    drive.release(seq)
    assert drive.admit(seq) == 8


def test_a_cache_of_one_token_blocks_shares_all_but_the_last_token():
    drive = Driver(block_size=1, num_blocks=32)
    drive.remember(range(6))
    seq = drive.start(range(6))
    assert seq.num_computed == 5
    drive.begin()
    assert drive.chunk(seq) == Advance(5, None, False)


def test_edges_that_all_share_one_key_are_still_told_apart(monkeypatch):
    monkeypatch.setattr("repertory.radix.tree.PrefixTree.key", staticmethod(lambda first: 0))
    drive = Driver(num_blocks=64)
    runs = [[lead, *range(11)] for lead in range(5)]
    kept = {lead: drive.remember(run) for lead, run in enumerate(runs)}
    for lead, run in enumerate(runs):
        assert drive.found(run) == 12
        assert drive.cache.tree.match(drive.cache.tree.root("shared"), TokenLog(run), 12).blocks == kept[lead]
    assert drive.found([77, *range(11)]) == 0
    seq = drive.start([3, *range(6), 90, 91])
    assert seq.table == kept[3][:1]
    assert drive.look_up(seq).copy == BlockCopy(kept[3][1], seq.table[1], 3)
    drive.close(seq)
    drive.cache.reset()
    drive.sound()
    assert isinstance(drive.cache, KVCache)
    assert drive.cache.counts().free == 64
