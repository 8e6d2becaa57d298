"""Random arrivals: what is fixed by the seed, and what they have in common."""

import itertools
import math
import random
import statistics

import pytest

from repertory.actors.commands.benching.arrivals import (
    DOCUMENT_EVERY,
    Lengths,
    mixed,
    poisson_times,
    random_prompts,
    shared_prefix_prompts,
)

LENGTHS = Lengths()


def test_the_same_seed_gives_the_same_requests_and_another_one_others():
    one, same, other = (mixed(50, 5.0, seed=seed, vocab_size=1000) for seed in (1, 1, 2))
    assert one == same
    assert one != other


def test_the_rate_changes_when_requests_come_and_nothing_else():
    slow, fast = mixed(50, 1.0, seed=1, vocab_size=1000), mixed(50, 10.0, seed=1, vocab_size=1000)
    assert [request[1:] for request in slow] == [request[1:] for request in fast]
    assert [request.at_s for request in slow] == pytest.approx([10 * request.at_s for request in fast])


def test_arrivals_are_a_poisson_process():
    times = poisson_times(20_000, 4.0, random.Random(3))
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert statistics.fmean(gaps) == pytest.approx(0.25, rel=0.03)
    assert statistics.pstdev(gaps) == pytest.approx(0.25, rel=0.05)
    assert min(gaps) >= 0


def test_an_infinite_rate_sends_everything_at_once():
    assert poisson_times(3, math.inf, random.Random(0)) == [0.0, 0.0, 0.0]


def test_a_mixed_workload_has_one_book_some_documents_and_many_chats():
    requests = mixed(160, 5.0, seed=1, vocab_size=1000)
    sizes = sorted((len(request.prompt) for request in requests), reverse=True)
    num_documents = 160 // DOCUMENT_EVERY
    assert sizes[0] == LENGTHS.book
    assert all(LENGTHS.document[0] <= size <= LENGTHS.document[1] for size in sizes[1 : num_documents + 1])
    assert all(LENGTHS.chat[0] <= size <= LENGTHS.chat[1] for size in sizes[num_documents + 1 :])
    answers = [request.max_tokens for request in requests]
    assert min(answers) >= LENGTHS.short_answer[0]
    assert max(answers) > LENGTHS.long_answer[0]
    assert 0.05 < sum(answer >= LENGTHS.long_answer[0] for answer in answers) / 160 < 0.25


@pytest.mark.parametrize("vocab_size", [1, 2, 17, 18, 320])
def test_ids_are_in_the_vocabulary_however_small(vocab_size):
    ids = {token for prompt in random_prompts(3, 50, seed=1, vocab_size=vocab_size) for token in prompt}
    assert all(0 <= token < vocab_size for token in ids)


def test_random_prompts_have_no_beginning_in_common():
    prompts = random_prompts(20, 30, seed=1, vocab_size=30_000)
    assert {len(prompt) for prompt in prompts} == {30}
    assert len({tuple(prompt[:4]) for prompt in prompts}) == 20


def test_prompts_of_a_group_share_its_prefix_and_nothing_more():
    prompts = shared_prefix_prompts(21, 10, num_groups=4, shared_len=50, seed=1, vocab_size=30_000)
    groups = {}
    for prompt in prompts:
        assert len(prompt) == 60
        groups.setdefault(tuple(prompt[:50]), []).append(tuple(prompt[50:]))
    assert sorted(map(len, groups.values())) == [5, 5, 5, 6]
    assert len({own[:3] for owns in groups.values() for own in owns}) == 21


def test_groups_come_in_mixed_order():
    prompts = shared_prefix_prompts(40, 1, num_groups=2, shared_len=5, seed=1, vocab_size=30_000)
    order = [prompt[0] == prompts[0][0] for prompt in prompts]
    assert order not in ([True, False] * 20, [True] * 20 + [False] * 20)


def test_more_groups_than_prompts_are_no_fault():
    assert len(shared_prefix_prompts(2, 1, num_groups=9, shared_len=5, seed=1, vocab_size=30_000)) == 2
