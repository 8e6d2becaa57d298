"""Rows whose logits were not finite: what leaves the tree, who is rolled back, what stays."""

from repertory.radix.cache import RolledBack
from repertory.tests.radix.drive import Driver, snapshot


def test_what_the_failed_row_computed_is_not_offered_for_reuse():
    drive = Driver()
    seq = drive.start(range(9))
    drive.begin()
    drive.chunk(seq)
    assert drive.cache.fail(seq.holding) == []
    drive.sound()
    assert drive.found(range(9)) == 0
    drive.close(seq)
    assert drive.cache.counts().free == 16
    assert drive.cache.tree.namespaces() == []


def test_what_was_proven_before_stays_and_only_the_unproven_tail_goes():
    drive = Driver()
    seq = drive.serve(range(9))
    for token in (1, 2):
        drive.decode(seq, token)
    drive.begin()
    drive.compute(seq, 1)  # completes the third block, and fails
    drive.cache.fail(seq.holding)
    drive.sound()
    assert drive.found([*range(9), 99, 1, 2]) == 8


def test_a_failure_between_two_blocks_drops_no_block():
    drive = Driver()
    seq = drive.serve(range(9))
    drive.begin()
    drive.compute(seq, 1)
    assert drive.cache.fail(seq.holding) == []
    assert seq.table == []
    assert drive.found(range(8)) == 8


def test_those_who_share_what_failed_are_rolled_back_to_where_it_starts():
    drive = Driver()
    drive.remember(range(4))
    bad = drive.start(range(17))
    shallow, deep, beside = drive.start([*range(8), 50]), drive.start([*range(16), 60, 61]), drive.start([*range(4), 70])
    drive.begin()
    for seq in (bad, shallow, deep, beside):
        drive.chunk(seq)
    drive.sample(beside, 1)
    rolled = drive.cache.fail(bad.holding)
    drive.sound()
    assert {victim.seq_id for victim in rolled} == {shallow.holding.seq_id, deep.holding.seq_id}
    assert {victim.num_tokens for victim in rolled} == {4}
    assert beside.holding.node is not None
    assert shallow.holding.node is deep.holding.node is bad.holding.node is None
    assert drive.admit(deep) == 4


def test_a_token_of_one_sharer_proves_the_shared_part_for_all():
    drive = Driver()
    bad, good = drive.start([*range(8), 1, 2, 3, 4, 5]), drive.start([*range(8), 60])
    drive.begin()
    drive.chunk(bad)
    drive.chunk(good)
    drive.sample(good, 9)
    assert drive.cache.fail(bad.holding) == []
    drive.sound()
    assert good.holding.node is not None
    assert drive.found([*range(8), 1, 2, 3, 4]) == 8


def test_a_guest_in_the_proven_head_of_a_growing_run_is_left_alone():
    drive = Driver()
    grower = drive.serve(range(16))
    guest = drive.start([*range(12), 70])
    for token in (1, 2, 3):
        drive.decode(grower, token)
    drive.begin()
    drive.compute(grower, 1)  # the fifth block, in the node of the other four
    assert grower.holding.num_tree_blocks == 5
    assert drive.cache.fail(grower.holding) == []
    assert guest.holding.node is not None
    drive.sound()


def test_a_token_of_a_step_planned_before_a_switch_proves_nothing_about_the_new_blocks():
    drive = Driver()
    first, second = drive.serve([1, 2, 3]), drive.serve([1, 2, 3])
    drive.begin()
    drive.compute(first, 1)
    drive.compute(second, 1)  # a duplicate: second reads its own
    second.log.append(4)
    read_its_own = drive.step_id
    drive.begin()
    drive.compute(second, 1)  # switched to first's block, which nobody has proven
    assert second.table[0] == first.table[0]
    drive.cache.prove(second.holding, read_its_own)
    assert [victim.seq_id for victim in drive.cache.fail(first.holding)] == [second.holding.seq_id]
    drive.sound()
    assert drive.found([1, 2, 3, 99]) == 0


def test_what_a_preempted_sequence_computed_in_flight_goes_too_when_its_row_failed():
    drive = Driver()
    seq = drive.start(range(12))
    drive.begin()
    drive.chunk(seq)
    drive.begin()
    drive.release(seq)
    late = drive.start([*range(8), 50, 51])
    assert late.num_computed == 8
    assert drive.cache.fail(seq.holding, seq.log) == [RolledBack(late.holding.seq_id, 0)]
    drive.sound()
    assert drive.found(range(12)) == 0


def test_a_preempted_sequence_whose_path_is_proven_or_gone_takes_nothing_with_it():
    drive = Driver()
    seq = drive.serve(range(8))
    extended = drive.start([*range(8), *[5] * 8])
    drive.begin()
    drive.chunk(extended)  # unproven, and below the end of what seq computed
    drive.release(seq)
    before = snapshot(drive.cache)
    assert drive.cache.fail(seq.holding, seq.log) == []
    assert drive.cache.fail(seq.holding) == []
    assert snapshot(drive.cache) == before
    drive.close(extended)
    drive.cache.reset()
    assert drive.cache.fail(seq.holding, seq.log) == []
    assert drive.cache.tree.namespaces() == []


def test_one_victim_twice_removed_is_reported_once_and_can_come_back():
    drive = Driver()
    bad, worse = drive.start(range(9)), drive.start(range(13))
    drive.begin()
    drive.chunk(bad)
    drive.chunk(worse)
    rolled = drive.cache.fail(bad.holding)
    assert rolled == [RolledBack(worse.holding.seq_id, 0)]
    assert drive.cache.fail(worse.holding) == []
    drive.close(bad)
    assert drive.admit(worse) == 0
    drive.begin()
    drive.chunk(worse)
    drive.sample(worse, 1)
    assert drive.found(range(12)) == 12
