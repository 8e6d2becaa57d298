"""Where runs are, and where they go: one rule of residency a test, down to the block."""

from __future__ import annotations

import pytest

from repertory.protocol.ids import SequenceId

from .two_tiers import TwoTiers

A, B, C, D = ([10 * n + i for i in range(1, 9)] for n in (1, 2, 3, 4))
"""Eight tokens each, of nothing in common."""


def on_host(tiers: TwoTiers, tokens: list[int]) -> None:
    """Leave `tokens` on the host only."""
    count = len(tokens) // tiers.size
    tiers.remember(tokens)
    tiers.cache.write_back(count)
    tiers.copy()
    tiers.cache.tree.evict(count)
    tiers.look()
    assert tiers.places(tokens) == ["host"] * count


def swapped(tiers: TwoTiers, tokens: list[int]):
    """A preempted sequence of `tokens`, whose blocks have been copied out and have left the device."""
    seq = tiers.serve(tokens)
    assert tiers.preempt(seq)
    tiers.copy()
    tiers.cache.tree.evict(len(tokens))
    tiers.look()
    return seq


# ---- out ------------------------------------------------------------------------------------------


def test_a_run_is_copied_out_head_first() -> None:
    tiers = TwoTiers()
    tiers.remember(A)
    assert tiers.cache.write_back(3) == 3
    assert tiers.places(A) == ["device out"] * 3 + ["device"] * 5
    tiers.copy()
    assert tiers.places(A) == ["device host"] * 3 + ["device"] * 5
    assert tiers.cache.write_back(100) == 5
    tiers.copy()
    assert tiers.places(A) == ["device host"] * 8
    tiers.check_contents()


def test_nothing_is_written_back_while_a_lane_is_busy() -> None:
    tiers = TwoTiers()
    tiers.remember(A)
    assert tiers.cache.write_back(2) == 2
    assert tiers.cache.write_back(2) == 0
    tiers.copy()
    assert tiers.cache.write_back(2) == 2


@pytest.mark.parametrize("count", [1, 3, 8])
def test_the_device_is_evicted_from_the_tail_exactly(count: int) -> None:
    tiers = TwoTiers()
    tiers.remember(A)
    tiers.cache.write_back(8)
    tiers.copy()
    free = tiers.cache.counts().free
    assert tiers.cache.tree.evict(count) == count
    tiers.look()
    assert tiers.cache.counts().free == free + count
    assert tiers.places(A) == ["device host"] * (8 - count) + ["host"] * count


def test_a_tail_without_a_copy_is_gone_and_its_head_stays() -> None:
    tiers = TwoTiers()
    tiers.remember(A)
    tiers.cache.write_back(3)
    tiers.copy()
    tiers.cache.tree.evict(6)
    tiers.look()
    assert tiers.places(A) == ["device host"] * 2 + ["host"] + [""] * 5


@pytest.mark.parametrize("count", [1, 2, 5])
def test_the_host_is_evicted_from_the_tail_exactly(count: int) -> None:
    tiers = TwoTiers(16, 8)
    on_host(tiers, A)
    tiers.remember(B)
    assert tiers.cache.write_back(count) == count
    tiers.look()
    assert tiers.places(A) == ["host"] * (8 - count) + [""] * count
    assert tiers.cache.host_counts().free == 0


def test_the_host_gives_up_what_has_been_used_least_recently() -> None:
    tiers = TwoTiers(16, 16)
    on_host(tiers, A)
    on_host(tiers, B)
    seq = tiers.open([*A, 1])
    assert tiers.admit(seq) == 8
    tiers.copy()
    tiers.release(seq)
    tiers.cache.tree.evict(8)
    tiers.remember(C)
    tiers.cache.write_back(3)
    assert tiers.places(B) == ["host"] * 5 + [""] * 3
    assert tiers.places(A) == ["host"] * 8


def test_write_back_does_not_displace_copies_of_what_is_on_the_device() -> None:
    tiers = TwoTiers(24, 8)
    tiers.remember(A)
    tiers.cache.write_back(8)
    tiers.copy()
    tiers.remember(B)
    assert tiers.cache.write_back(8) == 0
    assert tiers.places(A) == ["device host"] * 8


def test_a_run_that_moves_out_may_be_evicted_meanwhile_and_is_not_found_until_it_has_arrived() -> None:
    tiers = TwoTiers(8, 8)
    tiers.remember(A)
    tiers.cache.write_back(8)
    tiers.send()
    other = tiers.open([*B[:7], 5])
    assert tiers.admit(other) == 0
    assert tiers.chunk(other)
    assert tiers.places(A) == ["out"] * 8
    asks = tiers.open([*A, 1])
    assert tiers.cache.lookup(None, asks.log) == 0
    tiers.begin()
    while tiers.run("step"):
        pass
    assert tiers.queued["step"], "its blocks are still being copied"
    tiers.settle()
    assert tiers.places(A) == ["host"] * 8
    tiers.check_contents()


@pytest.mark.parametrize("ok", [True, False])
def test_blocks_of_a_run_that_moves_out_are_handed_to_a_copy_in_behind_a_fence(ok: bool) -> None:
    tiers = TwoTiers(8, 24)
    on_host(tiers, A)
    tiers.remember(B)
    tiers.cache.write_back(8)
    waits = tiers.open([*A[:7], 5])
    assert tiers.admit(waits) == 7
    assert {job.direction for job in tiers.send()} == {"out", "in"}
    assert not tiers.can_run("in")
    tiers.failing = lambda job: job.direction == "out" and not ok
    tiers.settle()
    assert tiers.places(B) == (["device host"] + ["host"] * 7 if ok else ["device"] + [""] * 7)
    assert tiers.places(A[:7]) == ["device host"] * 7
    assert tiers.chunk(waits)
    tiers.settle()
    tiers.check_contents()


def test_a_failed_copy_out_leaves_what_is_still_on_the_device_and_no_more() -> None:
    tiers = TwoTiers()
    tiers.remember(A)
    tiers.remember([*A, *B[:4]])
    tiers.cache.write_back(12)
    tiers.cache.write_back(12)
    tiers.send()
    tiers.cache.tree.evict(6)  # the other run, which is not on the host, and two of what moves
    before = tiers.places([*A, *B[:4]])
    tiers.copy(ok=False)
    after = tiers.places([*A, *B[:4]])
    assert after == [" ".join(word for word in place.split() if word == "device") for place in before]
    assert tiers.cache.host_counts().free == 16


def test_a_failed_copy_out_takes_along_what_hangs_on_it_on_the_host() -> None:
    tiers = TwoTiers()
    tiers.remember(A[:4])
    tiers.remember(A)
    tiers.cache.tree.split(tiers.cache.tree.peek(None).children[next(iter(tiers.cache.tree.peek(None).children))][0], 4)
    assert tiers.cache.write_back(4) == 4  # the tail
    tiers.copy()
    assert tiers.cache.tree.evict(4) == 4
    assert tiers.places(A) == ["device"] * 4 + ["host"] * 4
    assert tiers.cache.tree.evict(4) == 4
    assert tiers.places(A) == ["out"] * 4 + ["host"] * 4
    tiers.copy(ok=False)
    assert tiers.places(A) == [""] * 8
    assert tiers.cache.host_counts().free == 16


def split_run(tiers: TwoTiers):
    """`A` in two nodes: the head on the device only, the tail on the host only."""
    tiers.remember(A)
    root = tiers.cache.tree.peek(None)
    [[node]] = root.children.values()
    tiers.cache.tree.split(node, 4)
    assert tiers.cache.write_back(4) == 4
    tiers.copy()
    tiers.cache.tree.evict(4)
    tiers.look()
    assert tiers.places(A) == ["device"] * 4 + ["host"] * 4


def test_a_run_whose_eviction_would_orphan_what_is_on_the_host_is_copied_out_first() -> None:
    tiers = TwoTiers(16, 8)
    split_run(tiers)
    assert tiers.cache.tree.evict(2) == 2
    tiers.look()
    assert tiers.places(A) == ["device out"] * 2 + ["out"] * 2 + ["host"] * 4
    tiers.copy()
    assert tiers.places(A) == ["device host"] * 2 + ["host"] * 6
    tiers.check_contents()


def test_without_room_on_the_host_what_is_orphaned_goes() -> None:
    tiers = TwoTiers(16, 7)
    split_run(tiers)
    assert tiers.cache.tree.evict(2) == 2
    tiers.look()
    assert tiers.places(A) == ["device"] * 2 + [""] * 6
    assert tiers.cache.host_counts().free == 7


# ---- pins -----------------------------------------------------------------------------------------


def test_what_a_preempted_sequence_keeps_is_not_displaced_by_write_back_or_by_a_rescue() -> None:
    tiers = TwoTiers(32, 8)
    seq = swapped(tiers, A)
    tiers.remember(B)
    assert tiers.cache.write_back(8) == 0
    assert tiers.places(A) == ["host"] * 8
    counts = tiers.cache.host_counts()
    assert (counts.cached, counts.referenced) == (0, 8)
    tiers.cache.reset()
    tiers.look()
    assert tiers.places(A) == ["host"] * 8, "a reset forgets what nobody holds"
    tiers.close(seq)
    assert tiers.cache.host_counts().cached == 8


def test_a_preemption_takes_the_blocks_of_one_behind_it_and_that_ones_pin_goes_whole() -> None:
    tiers = TwoTiers(32, 12)
    late = swapped(tiers, A)
    seq = tiers.serve(B[:6])
    assert tiers.preempt(seq, [late])
    assert set(tiers.cache.host.pinned()) == {seq.holding.seq_id}
    assert tiers.places(A) == ["host"] * 6 + ["", ""], "two had to go: the tail's"
    assert tiers.cache.host_counts().cached == 6, "the rest is cache like any other"


def test_a_preemption_takes_nothing_of_one_that_is_not_behind_it() -> None:
    tiers = TwoTiers(32, 12)
    early = swapped(tiers, A)
    seq = tiers.serve(B[:6])
    assert not tiers.preempt(seq)
    assert set(tiers.cache.host.pinned()) == {early.holding.seq_id}
    assert tiers.places(A) == ["host"] * 8
    assert tiers.places(B[:6]) == ["device"] * 6
    assert not tiers.send()


def test_no_pin_goes_for_a_preemption_that_does_not_fit_even_then() -> None:
    tiers = TwoTiers(32, 8)
    late = swapped(tiers, A[:2])
    later = swapped(tiers, C[:2])
    seq = tiers.serve([*B, 1])
    assert not tiers.preempt(seq, [later, late])
    assert set(tiers.cache.host.pinned()) == {late.holding.seq_id, later.holding.seq_id}


def test_only_as_many_pins_go_as_are_needed_the_last_in_order_first() -> None:
    tiers = TwoTiers(32, 8)
    late, later = swapped(tiers, A[:4]), swapped(tiers, C[:4])
    assert tiers.preempt(tiers.serve(B[:3]), [later, late])
    assert late.holding.seq_id in tiers.cache.host.pinned()
    assert later.holding.seq_id not in tiers.cache.host.pinned()
    assert tiers.places(A[:4]) == ["host"] * 4
    assert tiers.places(C[:4]) == ["host"] + [""] * 3


def test_what_two_preempted_sequences_share_stays_until_both_are_back() -> None:
    tiers = TwoTiers(32, 16)
    one = tiers.serve([*A[:4], 1])
    two = tiers.serve([*A[:4], 2])
    assert tiers.preempt(one)
    assert tiers.places(A[:4]) == ["device"] * 4, "the other holds them"
    assert tiers.preempt(two)
    tiers.copy()
    tiers.cache.tree.evict(6)
    assert tiers.places(A[:4]) == ["host"] * 4
    tiers.close(one)
    assert tiers.cache.host_counts().cached == 1
    tiers.close(two)
    assert tiers.cache.host_counts().cached == 6


def test_the_pin_of_one_that_comes_back_is_given_back() -> None:
    tiers = TwoTiers(16, 8)
    seq = swapped(tiers, A)
    assert tiers.admit(seq) == 7
    tiers.copy()
    assert not tiers.cache.host.pinned()
    assert tiers.chunk(seq)
    tiers.settle()
    assert tiers.places(A) == ["device host"] * 8


# ---- in -------------------------------------------------------------------------------------------


def test_a_host_hit_brings_in_what_is_missing_and_nobody_reads_it_before() -> None:
    tiers = TwoTiers(16, 16)
    on_host(tiers, A)
    seq = tiers.open([*A, 1])
    assert tiers.admit(seq) == 8
    assert tiers.places(A) == ["host in"] * 8
    assert tiers.cache.lookup(None, seq.log) == 0
    tiers.copy()
    assert tiers.places(A) == ["device host"] * 8
    assert tiers.chunk(seq)
    tiers.settle()
    tiers.check_contents()


def test_a_prefix_on_both_tiers_is_fetched_only_where_the_device_lacks_it() -> None:
    tiers = TwoTiers(16, 16)
    tiers.remember(A)
    tiers.cache.write_back(8)
    tiers.copy()
    tiers.cache.tree.evict(3)
    seq = tiers.open([*A, 1])
    assert tiers.admit(seq) == 8
    [job] = tiers.send()
    assert (job.direction, len(job.sources)) == ("in", 3)
    assert tiers.places(A) == ["device host"] * 5 + ["host in"] * 3
    tiers.settle()
    assert tiers.chunk(seq)
    tiers.settle()


def test_a_second_sequence_joins_a_fetch_and_splits_what_is_moving() -> None:
    tiers = TwoTiers(16, 16)
    on_host(tiers, A)
    first, second = tiers.open([*A, 1]), tiers.open([*A[:5], 2])
    assert tiers.admit(first) == 8
    assert tiers.admit(second) == 5
    assert len(tiers.send()) == 1
    assert second.holding.jobs == first.holding.jobs
    assert second.table[:5] == first.table[:5]
    tiers.settle()
    assert tiers.chunk(first)
    assert tiers.chunk(second)
    tiers.settle()


def test_one_that_needs_more_than_is_moving_fetches_the_rest_only() -> None:
    tiers = TwoTiers(24, 16)
    on_host(tiers, A)
    first, second = tiers.open([*A[:5], 1]), tiers.open([*A, 2])
    assert tiers.admit(first) == 5
    assert tiers.admit(second) == 8
    assert [len(job.sources) for job in tiers.send()] == [5, 3]
    assert len(second.holding.jobs) == 2
    tiers.settle()
    assert tiers.chunk(second)
    tiers.settle()


def test_a_failed_copy_in_drops_what_it_was_to_bring_and_sets_back_all_who_waited() -> None:
    tiers = TwoTiers(32, 16)
    tiers.remember([*A, *B])
    tiers.cache.write_back(16)
    tiers.copy()
    tiers.cache.tree.evict(14)
    waiting = [tiers.open([*A, 1]), tiers.open([*A[:5], 2]), tiers.open([*A, *B, 3])]
    for seq in waiting:
        assert tiers.admit(seq) is not None
    assert tiers.admit(tiers.open([*A[:2], 7])) == 2
    tiers.copy(ok=False)
    assert tiers.lost == [seq.holding.seq_id for seq in waiting]
    assert tiers.places([*A, *B]) == ["device host"] * 2 + [""] * 14
    assert tiers.admit(waiting[0]) == 2
    assert tiers.chunk(waiting[0])
    tiers.settle()


def test_a_fetch_that_nobody_waits_for_any_more_leaves_cache_behind() -> None:
    tiers = TwoTiers(16, 16)
    on_host(tiers, A)
    seq = tiers.open([*A, 1])
    tiers.admit(seq)
    tiers.close(seq)
    assert tiers.places(A) == ["host in"] * 8
    assert tiers.cache.counts().referenced == 8
    tiers.copy()
    assert tiers.cache.counts().cached == 8
    assert tiers.cache.lookup(None, tiers.open([*A, 1]).log) == 8


def test_without_prefix_caching_a_fetch_is_cancelled_with_its_sequence_and_its_blocks_are_fenced() -> None:
    tiers = TwoTiers(8, 16, caching=False)
    seq = tiers.serve(A[:7])
    assert tiers.preempt(seq)
    tiers.copy()
    tiers.cache.tree.evict(7)
    seq.log.append(1)
    assert tiers.admit(seq) == 7
    tiers.send()
    tiers.close(seq)
    assert tiers.cache.counts().free == 8, "they may be handed on at once"
    assert tiers.cache.host_counts().free == 16
    other = tiers.open(B)
    assert tiers.admit(other) == 0
    assert tiers.chunk(other)
    tiers.begin()
    assert not tiers.can_run("step"), "the copy still writes into its blocks"
    tiers.settle()


def test_host_blocks_that_a_cancelled_fetch_reads_are_written_after_it() -> None:
    tiers = TwoTiers(16, 7, caching=False)
    seq = tiers.serve(A[:7])
    assert tiers.preempt(seq)
    tiers.copy()
    tiers.cache.tree.evict(7)
    seq.log.append(1)
    assert tiers.admit(seq) == 7
    tiers.send()
    tiers.close(seq)
    other = tiers.serve(B[:7])
    while tiers.run("step"):
        pass
    assert tiers.preempt(other)
    tiers.send()
    assert not tiers.can_run("out")
    tiers.settle()
    tiers.check_contents()


def test_what_is_not_worth_fetching_is_computed_and_the_run_is_on_both_tiers_then() -> None:
    tiers = TwoTiers(16, 16)
    on_host(tiers, A)
    seq = tiers.open([*A[:5], 1])
    assert tiers.admit(seq, fetch=False) == 0
    assert tiers.chunk(seq)
    assert tiers.places(A) == ["device host"] * 5 + ["host"] * 3
    assert not tiers.send()
    tiers.settle()
    tiers.check_contents()


def test_a_recomputed_run_that_turns_out_bad_takes_along_what_hung_on_it() -> None:
    tiers = TwoTiers(16, 16)
    on_host(tiers, A)
    seq = tiers.open([*A[:5], 1])
    tiers.admit(seq, fetch=False)
    tiers.chunk(seq)
    tiers.begin()
    tiers.cache.fail(seq.holding, seq.log)
    tiers.look()
    assert tiers.places(A) == [""] * 8
    assert tiers.cache.host_counts().free == 16


def test_a_run_that_moves_in_is_not_recomputed_into_the_tree_a_second_time() -> None:
    tiers = TwoTiers(24, 16)
    on_host(tiers, A)
    computing = tiers.open([*A, 1])
    assert tiers.admit(computing, fetch=False) == 0
    assert tiers.admit(tiers.open([*A, 2])) == 8
    assert tiers.chunk(computing)
    assert computing.holding.num_tree_blocks == 0, "its own copies stay private"
    tiers.copy()
    computing.log.append(5)
    assert tiers.chunk(computing)
    assert computing.holding.num_tree_blocks == 10
    tiers.settle()
    tiers.check_contents()


def test_a_fetch_displaces_cold_cache_and_never_what_it_fetches() -> None:
    tiers = TwoTiers(8, 8)
    on_host(tiers, A[:6])
    tiers.remember(B)
    seq = tiers.open([*A[:6], 1])
    assert tiers.admit(seq) == 6
    tiers.copy()
    assert tiers.places(A[:6]) == ["device host"] * 6
    assert tiers.chunk(seq)
    tiers.settle()


def test_a_sequence_without_room_leaves_no_trace_of_its_fetch() -> None:
    tiers = TwoTiers(8, 16)
    on_host(tiers, A[:6])
    holder = tiers.serve(B[:4])
    seq = tiers.open([*A[:6], 1])
    before = (tiers.where(), tiers.cache.counts(), tiers.cache.host_counts())
    assert tiers.admit(seq) is None
    assert not tiers.cache.fetch_ahead(seq.holding, seq.log, spare=0, may_fetch=lambda start, count: True)
    assert (tiers.where(), tiers.cache.counts(), tiers.cache.host_counts()) == before
    assert not tiers.send()
    tiers.close(holder)
    assert tiers.admit(seq) == 6


def test_what_is_fetched_ahead_is_cache_when_it_arrives() -> None:
    tiers = TwoTiers(16, 16)
    seq = swapped(tiers, A)
    assert tiers.cache.fetch_ahead(seq.holding, seq.log, spare=0, may_fetch=lambda start, count: True)
    tiers.look()
    tiers.copy()
    assert tiers.cache.counts().cached == 7
    assert tiers.admit(seq) == 7
    assert not seq.holding.jobs


def test_the_last_token_is_never_fetched() -> None:
    tiers = TwoTiers(16, 16)
    on_host(tiers, A)
    seq = tiers.open(A)
    assert tiers.admit(seq) == 7


# ---- splits ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", [1, 3, 4, 7])
@pytest.mark.parametrize("ok", [True, False])
def test_a_run_that_is_partly_moving_out_is_split_anywhere(at: int, ok: bool) -> None:
    tiers = TwoTiers(16, 16)
    tiers.remember(A)
    tiers.cache.write_back(2)
    tiers.copy()
    tiers.cache.write_back(2)
    tiers.send()
    assert tiers.places(A) == ["device host"] * 2 + ["device out"] * 2 + ["device"] * 4
    seq = tiers.open([*A[:at], 1])
    assert tiers.admit(seq) == at
    assert tiers.places(A) == ["device host"] * 2 + ["device out"] * 2 + ["device"] * 4
    tiers.copy(ok=ok)
    assert tiers.places(A) == ["device host"] * (4 if ok else 2) + ["device"] * (4 if ok else 6)
    tiers.check_contents()


@pytest.mark.parametrize("at", [1, 3, 5])
@pytest.mark.parametrize("ok", [True, False])
def test_a_run_that_is_partly_moving_in_is_split_anywhere(at: int, ok: bool) -> None:
    tiers = TwoTiers(24, 16)
    tiers.remember(A)
    tiers.cache.write_back(8)
    tiers.copy()
    tiers.cache.tree.evict(6)
    first, second = tiers.open([*A[:6], 1]), tiers.open([*A[:at], 2])
    assert tiers.admit(first) == 6
    assert tiers.admit(second) == at
    assert bool(second.holding.jobs) == (at > 2)
    tiers.copy(ok=ok)
    if ok:
        assert tiers.places(A) == ["device host"] * 6 + ["host"] * 2
    else:
        assert tiers.places(A) == ["device host"] * 2 + [""] * 6
    assert (second.holding.node is None) == (at > 2 and not ok)


def test_a_run_that_is_unproven_and_moving_in_fails_without_those_who_wait_for_what_is_above_it() -> None:
    tiers = TwoTiers(32, 32)
    tiers.close(tiers.serve(A[:4]))
    author = tiers.open([*A[:4], *B[:4], 9])
    assert tiers.admit(author) == 4
    assert tiers.chunk(author)
    tiers.begin()  # its row is in flight, and nothing has been drawn from it
    assert tiers.preempt(author)
    tiers.copy()
    tiers.cache.tree.evict(9)
    above, below = tiers.open([*A[:4], 1]), tiers.open([*A[:4], *B[:4], 2])
    assert tiers.admit(below) == 8
    assert tiers.admit(above) == 4
    assert above.holding.jobs == below.holding.jobs
    victims = tiers.cache.fail(author.holding, author.log)
    tiers.look()
    assert [victim.seq_id for victim in victims] == [SequenceId(below.holding.seq_id)]
    tiers.copy()
    assert not above.holding.jobs
    assert tiers.places([*A[:4], *B[:4]]) == ["device host"] * 4 + [""] * 4
    assert tiers.chunk(above)
    tiers.settle()


# ---- fences ---------------------------------------------------------------------------------------


def test_a_block_that_a_step_copied_from_is_not_overwritten_by_a_copy_in_before_that_step() -> None:
    tiers = TwoTiers(5, 8, block_size=4)
    on_host(tiers, A)
    tiers.remember(B)
    tiers.settle()
    reads = tiers.open([*B[:6], 1])
    assert tiers.admit(reads) == 4
    assert tiers.chunk(reads)
    assert [copy.num_tokens for copy in tiers.step.copies] == [2]
    tiers.begin()
    hog = tiers.open(C[:3])
    assert tiers.admit(hog) == 0
    assert tiers.chunk(hog)
    waits = tiers.open([*A, 1])
    assert tiers.cache.fetch_ahead(waits.holding, waits.log, spare=0, may_fetch=lambda start, count: True)
    [job] = [job for job in tiers.send() if job.direction == "in"]
    assert tiers.queued["step"][0].copies[0].source in job.targets
    assert not tiers.can_run("in")
    tiers.settle()


def test_a_step_that_reads_what_was_released_is_over_before_a_copy_in_takes_its_blocks() -> None:
    tiers = TwoTiers(8, 8)
    on_host(tiers, A[:7])
    reader = tiers.serve(B[:7])
    reader.log.append(3)
    assert tiers.chunk(reader)
    tiers.begin()
    tiers.release(reader)  # its row is in flight
    waits = tiers.open([*A[:7], 1])
    assert tiers.admit(waits) == 7
    tiers.send()
    assert not tiers.can_run("in")
    tiers.settle()
    assert tiers.chunk(waits)
    tiers.settle()


def test_a_copy_out_waits_for_the_step_that_writes_what_it_copies() -> None:
    tiers = TwoTiers(16, 16)
    seq = tiers.open(A)
    tiers.admit(seq)
    tiers.chunk(seq)
    tiers.begin()
    assert tiers.preempt(seq)
    tiers.send()
    assert not tiers.can_run("out")
    tiers.settle()
    tiers.check_contents()
