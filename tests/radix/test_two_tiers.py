"""Where runs are, and how they leave: one rule of residency a test, down to the block."""

from __future__ import annotations

import pytest

from .two_tiers import A, B, C, TwoTiers, on_host, swapped

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


def split_run(tiers: TwoTiers, at: int = 4):
    """`A` in two nodes: the head of `at` blocks on the device only, the tail on the host only."""
    tiers.remember(A)
    root = tiers.cache.tree.peek(None)
    [node] = [node for bucket in root.children.values() for node in bucket if node.blocks]
    tiers.cache.tree.split(node, at)
    assert tiers.cache.write_back(8 - at) == 8 - at
    tiers.copy()
    tiers.cache.tree.evict(8 - at)
    tiers.look()
    assert tiers.places(A) == ["device"] * at + ["host"] * (8 - at)


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
    tiers = TwoTiers(16, 4)
    split_run(tiers, at=5)
    assert tiers.cache.tree.evict(2) == 2
    tiers.look()
    assert tiers.places(A) == ["device"] * 3 + [""] * 5
    assert tiers.cache.host_counts().free == 4


def test_what_hangs_below_gives_as_many_blocks_as_copying_what_is_above_it_takes() -> None:
    tiers = TwoTiers(16, 7)
    split_run(tiers)
    assert tiers.cache.tree.evict(1) == 1
    tiers.look()
    assert tiers.places(A) == ["device out"] * 3 + ["out"] + ["host"] * 3 + [""]


def test_colder_runs_go_before_what_would_be_orphaned() -> None:
    tiers = TwoTiers(16, 8)
    tiers.remember(B[:4])
    assert tiers.cache.write_back(4) == 4
    tiers.copy()
    tiers.cache.tree.evict(4)
    split_run(tiers)
    assert tiers.places(B[:4]) == ["host"] * 4
    assert tiers.cache.tree.evict(1) == 1
    tiers.look()
    assert tiers.places(A) == ["device out"] * 3 + ["out"] + ["host"] * 4
    assert tiers.places(B[:4]) == [""] * 4


@pytest.mark.parametrize("host_blocks", [3, 7])
def test_write_back_copies_as_much_as_there_is_room_for(host_blocks: int) -> None:
    tiers = TwoTiers(16, host_blocks)
    tiers.remember(A)
    assert tiers.cache.write_back(8) == host_blocks
    tiers.look()


def test_write_back_goes_on_although_a_prefix_that_is_always_in_use_is_the_oldest_on_a_full_host() -> None:
    tiers = TwoTiers(24, 8)
    held = tiers.serve(A)
    assert tiers.cache.write_back(4, [held.holding]) == 4
    tiers.copy()
    for turn in range(4):
        cold = [100 + 10 * turn + place for place in range(4)]
        tiers.remember(cold)
        assert tiers.cache.write_back(4) == 4, f"turn {turn}"
        tiers.copy()
        tiers.cache.tree.evict(4)
        tiers.look()
        assert tiers.places(cold) == ["host"] * 4


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
