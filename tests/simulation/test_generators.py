"""Workloads made up: the same for the same seed, as many, as often and as long as asked, and with what in common."""

from __future__ import annotations

import statistics

import msgspec
import pytest

from repertory.actors.simulation.generators import GENERATORS, Segments, Shape

SHAPE = Shape(count=400, rate=5.0, input_len=200, output_len=50, prefix_len=300, groups=4, turns=3, burst=20, seed=9)


def facts(jobs):
    return [(job.arrival_s, tuple(job.prompt()), job.outputs[0].length, job.max_tokens) for job in jobs]


def begins(job, count):
    return tuple(job.prompt()[:count])


@pytest.mark.parametrize("name", GENERATORS)
def test_the_same_seed_gives_the_same_requests_and_another_others(name):
    jobs = GENERATORS[name](SHAPE)
    assert len(jobs) == 400
    assert facts(jobs) == facts(GENERATORS[name](SHAPE))
    assert facts(jobs) != facts(GENERATORS[name](msgspec.structs.replace(SHAPE, seed=10)))
    assert [job.arrival_s for job in jobs] == sorted(job.arrival_s for job in jobs)
    assert all(len(job.prompt()) == job.num_prompt_tokens for job in jobs)
    assert statistics.mean(job.outputs[0].length for job in jobs) == pytest.approx(50, rel=0.15)


@pytest.mark.parametrize("name", ["poisson", "bursts", "shared-prefix", "mooncake-like"])
def test_the_rate_is_what_was_asked_for(name):
    jobs = GENERATORS[name](msgspec.structs.replace(SHAPE, count=3000))
    assert 3000 / jobs[-1].arrival_s == pytest.approx(5.0, rel=0.25)


def test_poisson_requests_have_nothing_in_common():
    jobs = GENERATORS["poisson"](SHAPE)
    assert len({begins(job, 1) for job in jobs}) == 400


def test_a_burst_comes_at_once():
    jobs = GENERATORS["bursts"](SHAPE)
    assert len({job.arrival_s for job in jobs}) == 20


def test_groups_share_their_prefix_and_no_more():
    jobs = GENERATORS["shared-prefix"](SHAPE)
    assert len({begins(job, 300) for job in jobs}) == 4
    assert len({begins(job, 301) for job in jobs}) == 400


def test_a_chats_turn_begins_with_all_that_was_said_before_it():
    jobs = GENERATORS["chats"](msgspec.structs.replace(SHAPE, count=120))
    assert len({begins(job, 300) for job in jobs}) == 1
    told = {(*job.prompt(), *job.outputs[0].tokens): job for job in jobs}
    turns = [job for job in jobs if any(begins(job, len(before)) == before for before in told)]
    assert len(turns) > 40
    for turn in turns[:20]:
        before = max((one for one in told if begins(turn, len(one)) == one), key=len)
        assert turn.arrival_s > told[before].arrival_s


def test_there_are_only_so_many_tokens():
    with pytest.raises(OverflowError):
        Segments().new(2**30)
