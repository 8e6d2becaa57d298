"""How runs come back from the host, who waits for them, and what they must not overtake."""

from __future__ import annotations

import pytest

from repertory.protocol.ids import SequenceId
from repertory.radix.node import Node

from .two_tiers import A, B, C, TwoTiers, on_host, swapped

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


def leave_in_the_middle_of_a_fetch(tiers: TwoTiers) -> None:
    """A sequence of 7 blocks is swapped out, evicted, on its way back in, and ends there."""
    seq = tiers.serve(A[:7])
    assert tiers.preempt(seq)
    tiers.copy()
    tiers.cache.tree.evict(7)
    seq.log.append(1)
    assert tiers.admit(seq) == 7
    tiers.send()
    tiers.close(seq)


def test_without_prefix_caching_a_fetch_is_cancelled_with_its_sequence_and_its_blocks_are_fenced() -> None:
    tiers = TwoTiers(8, 16, caching=False)
    leave_in_the_middle_of_a_fetch(tiers)
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
    leave_in_the_middle_of_a_fetch(tiers)
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


def test_cache_that_a_step_in_flight_still_reads_is_not_overwritten_by_a_copy_in() -> None:
    tiers = TwoTiers(3, 8, block_size=4)
    on_host(tiers, A[:4])
    reader = tiers.serve(B)
    reader.log.append(3)
    assert tiers.chunk(reader)
    tiers.begin()
    reads = tiers.queued["step"][-1].step_id
    tiers.release(reader)
    hog = tiers.open(C[:3])
    assert tiers.admit(hog) == 0
    assert tiers.chunk(hog), "it gets the block that step wrote"
    waits = tiers.open([*A[:4], 1])
    assert tiers.cache.fetch_ahead(waits.holding, waits.log, spare=0, may_fetch=lambda start, count: True)
    [job] = tiers.send()
    assert job.after.step == reads, "what it evicted was written before, and read by that one"
    tiers.settle()


def test_private_blocks_given_back_are_fenced_by_the_last_step_that_was_sent() -> None:
    tiers = TwoTiers(4, 4, block_size=4)
    seq = tiers.open(A[:3])
    tiers.admit(seq)
    tiers.chunk(seq)
    tiers.begin()
    for _ in range(2):  # tokens that are not known yet: the full block stays private
        assert tiers.compute(seq, 1)
        tiers.begin()
    read_only = seq.table[0]
    sent = tiers.queued["step"][-1].step_id
    assert tiers.cache.pool.last_step[read_only] < sent
    tiers.release(seq)
    assert tiers.cache.pool.fences([read_only]).step == sent


def test_what_a_cancelled_fetch_gives_back_is_in_the_same_order_wherever_its_runs_lie_in_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A recorded run is replayed in another process, where a set of the same runs has another order."""

    def handed_out_next(salt: int) -> list[int]:
        monkeypatch.setattr(Node, "__hash__", lambda self: hash((id(self), salt)))
        tiers = TwoTiers(16, 16)
        on_host(tiers, A)
        sequences = [tiers.open([*A[:end], end]) for end in (8, 6, 4, 2)]
        for seq in sequences:
            assert tiers.admit(seq) is not None
        tiers.send()
        for seq in sequences:
            tiers.cache.release(seq.holding)
        assert tiers.cache.cancel_unwanted()
        tiers.copy()
        return [int(block) for block in tiers.cache.pool.take(16)]

    assert len({tuple(handed_out_next(salt)) for salt in range(10)}) == 1
