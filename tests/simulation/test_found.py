"""What the checker found, each as the few events that it takes."""

from __future__ import annotations

from repertory.protocol.config import EngineConfig
from repertory.protocol.sampling import SamplingParams

from .hand_driven import HandDriven

GREEDY = SamplingParams(temperature=0.0, max_tokens=4)


def engine(**settings: object) -> HandDriven:
    defaults = {"block_size": 4, "num_device_blocks": 30, "max_num_batched_tokens": 64, "max_num_seqs": 4}
    return HandDriven(EngineConfig(model="simulated", **{**defaults, **settings}), num_host_blocks=0)


def test_who_left_before_its_row_was_known_to_have_failed_leaves_nothing_to_share() -> None:
    """Its KV stayed in the cache as if it were sound, and whoever came with the same prompt read it, and failed."""
    world = engine()
    prompt = list(range(20))
    first = world.come(prompt, GREEDY)
    world.poisoned.add(first)
    world.plan()
    world.run_step()
    world.leave(first)
    world.poisoned.clear()
    while world.answers:
        world.answer()
    second = world.come(prompt, GREEDY)
    world.run_to_the_end()
    assert world.guests[second].reasons == {0: "length"}
    assert world.checker.answers.opens[second].num_cached_tokens == 0
