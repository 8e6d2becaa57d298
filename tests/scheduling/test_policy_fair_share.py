"""`fair-share`: tenants that wait are served alike, measured in what was computed; idleness saves nothing up."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from repertory.actors.scheduling.policies import fair_share
from repertory.actors.scheduling.policies.fair_share import DECODE_COST, PREFILL_COST, Policy
from repertory.protocol.ids import RequestId

from .lossy import LossyWorld
from .world import World


class SharedWorld(LossyWorld):
    """Prompts here start with different tokens, so that nothing is cached unless a test wants it."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(scheduling_policy="fair-share", **{"block_size": 4, **settings})
        self.num_prompts = 0

    def ask(self, tenant: str | None, length: int = 8, max_tokens: int = 4, **submit: Any) -> RequestId:
        self.num_prompts += 1
        head = [self.num_prompts % 997, self.num_prompts // 997]
        return self.submit([*head, *[7] * (length - 2)], max_tokens=max_tokens, tenant=tenant, **submit)

    def order(self) -> list[str | None]:
        """Tenants in the order in which their requests first ran."""
        first: dict[int, int] = {}
        for step in (*self.past_steps, *self.steps):
            for seq_id in step.seq_ids:
                first.setdefault(seq_id, len(first))
        return [self.admits[RequestId(seq_id)].tenant for seq_id in sorted(first, key=lambda seq_id: first[seq_id])]


def policy_of(world: World) -> Policy:
    policy = world.core.policy
    assert isinstance(policy, Policy)
    return policy


def settle(world: World) -> None:
    while world.core.num_live:
        world.step()
    world.check_outputs()
    world.check_nothing_is_left()
    policy = policy_of(world)
    assert not policy._waiting and not policy._queues and not policy._num_waiting
    assert not policy._owed and not policy._owed_by


def work_of(world: SharedWorld) -> Counter[str | None]:
    """What the device has computed for each tenant, in the policy's units, counted from the steps themselves."""
    work: Counter[str | None] = Counter()
    for step in world.steps[: len(world.steps) - len(world.in_flight)]:
        for seq_id, start, count in zip(step.seq_ids, step.starts, step.num_tokens, strict=True):
            admit = world.admits[RequestId(seq_id)]
            work[admit.tenant] += count * (DECODE_COST if start >= len(admit.token_ids) else PREFILL_COST)
    return work


# ---- turns ----------------------------------------------------------------------------------------


def test_tenants_take_turns_however_many_requests_one_has() -> None:
    world = SharedWorld(max_num_seqs=1)
    for _ in range(12):
        world.ask("many")
    for _ in range(3):
        world.ask("few")
    settle(world)
    assert world.order()[:7] == ["many", "few", "many", "few", "many", "few", "many"]


def test_requests_without_a_tenant_are_one_tenant() -> None:
    world = SharedWorld(max_num_seqs=1)
    for _ in range(6):
        world.ask(None)
    world.ask("")
    settle(world)
    assert world.order()[:2] == [None, ""]


def test_requests_of_a_tenant_come_by_arrival() -> None:
    world = SharedWorld(max_num_seqs=1)
    requests = [world.ask("a", length=3 + number % 5, priority=-number) for number in range(8)]
    settle(world)
    assert list(world.ends) == requests


def test_one_tenant_does_not_fill_all_slots_before_its_first_token_counts() -> None:
    world = SharedWorld(max_num_seqs=8, max_num_batched_tokens=16)
    for _ in range(20):
        world.ask("first", length=40)
    for _ in range(20):
        world.ask("second", length=40)
    world.step()
    running = Counter(world.admits[request].tenant for request in world.running())
    assert running == {"first": 4, "second": 4}
    settle(world)


def test_long_requests_of_one_tenant_weigh_as_much_as_many_short_ones_of_another() -> None:
    world = SharedWorld(max_num_seqs=2, blocks=400)
    for _ in range(40):
        world.ask("long", length=60, max_tokens=30)
    for _ in range(400):
        world.ask("short", length=4, max_tokens=2)
    for _ in range(600):
        world.step()
    work = work_of(world)
    assert abs(work["long"] - work["short"]) <= 2 * max(60, DECODE_COST * 2 * 90)
    for request in list(world.admits):
        world.abort(request)
    settle(world)


# ---- what is charged ------------------------------------------------------------------------------


def test_counters_are_what_was_computed_prefill_and_decode_apart() -> None:
    world = SharedWorld(max_num_seqs=4, max_num_batched_tokens=16)
    for number in range(9):
        world.ask("ab"[number % 2], length=5 + number, max_tokens=1 + number)
    settle(world)
    served, work = policy_of(world).served, work_of(world)
    assert served["a"] - work["a"] == 0 and served["b"] - work["b"] >= 0  # b was lifted to a's counter when it came


def test_what_the_cache_holds_costs_nothing() -> None:
    world = SharedWorld(max_num_seqs=1)
    stem = list(range(100, 180))
    world.submit([*stem, 1], max_tokens=1, tenant="other")
    world.run()
    before = policy_of(world).served.copy()
    world.submit([*stem, 2], max_tokens=1, tenant="a")
    lifted = policy_of(world).counter("a")
    world.run()
    assert policy_of(world).counter("a") - lifted == PREFILL_COST
    assert policy_of(world).served["other"] == before["other"]


def test_recomputation_after_a_preemption_is_charged() -> None:
    world = SharedWorld(max_num_seqs=4, blocks=8, enable_prefix_caching=False, preemption_mode="recompute")
    world.without_reserve()
    for _ in range(4):
        world.ask("a", length=8, max_tokens=16)
    settle(world)
    assert sum(world.core.pressure.num_preemptions.values()) > 0
    assert policy_of(world).served["a"] > 4 * (8 * PREFILL_COST + 15 * DECODE_COST)


def test_a_step_that_the_device_took_along_is_not_charged_and_nothing_stays_owed() -> None:
    world = SharedWorld(max_num_seqs=2, max_num_batched_tokens=8)
    for _ in range(3):
        world.ask("a", length=30)
    world.plan()
    assert policy_of(world).counter("a") == 60
    world.relive()
    assert policy_of(world).served["a"] == 0 and policy_of(world).counter("a") == 0
    settle(world)


def test_an_abort_in_the_middle_of_a_prompt_pays_for_what_was_computed_only() -> None:
    world = SharedWorld(max_num_seqs=1, max_num_batched_tokens=8)
    request = world.ask("a", length=64)
    for _ in range(3):
        world.step()
    world.abort(request)
    assert policy_of(world).counter("a") == 24
    settle(world)


# ---- coming back ----------------------------------------------------------------------------------


def test_a_tenant_that_was_idle_has_saved_nothing_up() -> None:
    world = SharedWorld(max_num_seqs=1)
    world.run(world.ask("idle"))
    for _ in range(60):
        world.ask("busy")
    for _ in range(100):
        world.step()
    for _ in range(20):
        world.ask("idle")
    came = len(world.order())
    settle(world)
    turns = world.order()[came : came + 12]
    assert 5 <= turns.count("idle") <= 7, "its turn every other time, not until it has caught up"


def test_one_that_comes_when_nobody_waits_is_no_better_off_than_the_last_who_did() -> None:
    world = SharedWorld(max_num_seqs=1)
    for _ in range(5):
        world.run(world.ask("regular", max_tokens=20))
    world.ask("new")
    assert policy_of(world).counter("new") == policy_of(world).counter("regular") > 0
    settle(world)


def test_a_debt_is_not_forgotten_by_leaving_and_coming_back_at_once() -> None:
    world = SharedWorld(max_num_seqs=1)
    for _ in range(6):
        world.ask("patient", length=8, max_tokens=2)
    world.run(world.ask("greedy", length=200, max_tokens=50))
    world.ask("greedy")
    settle(world)
    assert world.order() == ["patient", "greedy", *["patient"] * 5, "greedy"]


def test_counters_of_many_tenants_that_come_once_are_not_kept_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fair_share, "MOST_IDLE", 10)
    world = SharedWorld(max_num_seqs=2)
    for number in range(300):
        world.ask(f"tenant {number}", length=3, max_tokens=1)
    settle(world)
    assert len(policy_of(world).served) <= 2 * 10 + 3
    assert len(policy_of(world)._heap) <= fair_share.LEAST_STALE + 1


def test_aborted_requests_behind_one_that_waits_long_are_not_kept() -> None:
    world = SharedWorld(max_num_seqs=1)
    world.ask("a", max_tokens=500)
    world.step()
    world.ask("b", max_tokens=1)
    for _ in range(10 * fair_share.LEAST_STALE):
        world.abort(world.ask("b"))
    assert len(policy_of(world)._queues["b"]) <= fair_share.LEAST_STALE + 3
    assert len(policy_of(world)._heap) <= fair_share.LEAST_STALE + 6
    settle(world)


# ---- anything at all ------------------------------------------------------------------------------


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10**9))
def test_two_tenants_that_keep_waiting_are_served_alike_within_the_bound(seed: int) -> None:
    rng = random.Random(seed)
    slots, longest = rng.choice([1, 2, 4]), rng.choice([6, 40])
    world = SharedWorld(
        max_num_seqs=slots, blocks=400, max_num_batched_tokens=rng.choice([8, 64]), max_steps_in_flight=rng.choice([1, 2])
    )
    lengths = {tenant: rng.randint(2, longest) for tenant in ("a", "b", "c")}
    outputs = {tenant: rng.randint(1, 20) for tenant in lengths}
    bound = 2 * max(PREFILL_COST * longest, DECODE_COST * slots * (longest + 20))
    for _ in range(150):
        waiting = Counter(world.admits[request].tenant for request in world.waiting())
        for tenant in lengths:
            for _ in range(slots + 1 - waiting[tenant]):
                world.ask(tenant, length=lengths[tenant], max_tokens=outputs[tenant])
        world.step()
        work = work_of(world)
        assert max(work.values()) - min(work[tenant] for tenant in lengths) <= bound
    for request in list(world.admits):
        world.abort(request)
    settle(world)
