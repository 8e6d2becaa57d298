"""A scenario from a seed: small engines under every kind of traffic and trouble, so that seldom things happen often."""

from __future__ import annotations

import random

from ...protocol.config import EngineConfig
from ...protocol.sampling import SamplingParams
from ..scheduling.policies import installed_policies
from .scenario import Fault, FaultKind, Scenario, Visitor, Weather

VOCABULARY = 50
STOP_ID = 7
LONGEST_PROMPT = 48
POLICIES = tuple(
    name for name in ("fcfs", "static", "priority", "longest-prefix", "fair-share") if name in installed_policies()
)
KINDS: tuple[FaultKind, ...] = ("die", "hang", "jump", "stall", "crash", "poison", "reset", "shared")


def draw(seed: int) -> Scenario:
    """The scenario of `seed`. About a third of all have no faults, so that a slip elsewhere is not hidden by recovery."""
    return _Drawing(seed).scenario()


class _Drawing:
    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.random = random.Random(seed)
        pick = self.random.choice
        self.is_pressed = self.random.random() < 0.3
        """Memory is short on both tiers, with many who want it for long: much moves between them."""
        if self.is_pressed:
            self.block_size, self.blocks = pick([1, 2, 4]), pick([8, 12, 20])
        else:
            self.block_size, self.blocks = pick([1, 2, 4, 4, 8]), pick([3, 12, 12, 20, 40, 120])
        self.step_s = 0.01
        self.has_faults = self.random.random() < 0.7
        self.pool_tokens = self.blocks * self.block_size
        self.longest = min(LONGEST_PROMPT, max(1, self.pool_tokens - 2))
        self.stems = [self._tokens(LONGEST_PROMPT) for _ in range(3)]
        self.is_slow = self.random.random() < 0.35
        self.has_classes = self.random.random() < 0.5
        self.leave_rate = self.random.choice([0.0, 0.08, 0.3])
        self.twin_rate = self.random.choice([0.05, 0.3, 0.8])
        self.prompts: list[tuple[int, ...]] = []
        # A draw of its own: it came later, and the other seeds were to stay what they are.
        self.is_sick = self.has_faults and random.Random(f"{seed} sick").random() < 0.15
        """Rows of many turn NaN, of whom half are gone before it is known, among others with the same prompt."""
        if self.is_sick:
            self.leave_rate, self.twin_rate = 0.3, 0.8

    def scenario(self) -> Scenario:
        pick, chance = self.random.choice, self.random.random
        config = self._config()
        visitors = self._visitors()
        return Scenario(
            seed=self.seed,
            config=config,
            num_device_blocks=self.blocks,
            num_host_blocks=pick([3, 8, 12, 30]) if self.is_pressed else pick([0, 0, 1, 3, 12, 60, 240]),
            vocab_size=VOCABULARY,
            max_model_len=pick([self.pool_tokens, self.pool_tokens // 2 + 2, 10**6]),
            has_reserve=chance() < (0.1 if self.is_pressed else 0.4),
            is_paced=chance() < 0.4,
            weather=self._weather(),
            visitors=visitors,
            faults=self._faults(visitors) if self.has_faults else (),
        )

    def _config(self) -> EngineConfig:
        pick, chance = self.random.choice, self.random.random
        return EngineConfig(
            model="simulated",
            block_size=self.block_size,
            num_device_blocks=self.blocks,
            max_steps_in_flight=pick([1, 2, 2]),
            max_num_batched_tokens=pick([1, 3, 7, 16, 64, 512]),
            max_num_seqs=pick([2, 3, 4, 8] if self.is_pressed else [1, 2, 4, 16]),
            max_num_queued=pick([2, 1000, 1000]),
            enable_chunked_prefill=chance() < 0.7,
            enable_prefix_caching=chance() < 0.8,
            max_prefill_batch_size=pick([None, None, 1, 2]),
            # A draw of its own: the rest of a scenario is the same whatever else is installed.
            scheduling_policy=random.Random(f"{self.seed} policy").choice(POLICIES),
            scheduling_delay_s=pick([0.0, 0.0, 0.035]),
            scheduling_delay_factor=pick([0.0, 0.0, 2.5]),
            preemption_mode=pick(["auto", "swap", "swap"] if self.is_pressed else ["auto", "swap", "heuristic", "recompute"]),
            credit_window=pick([1, 3, 8]) if self.is_slow else 1024,
            max_pause_s=pick([0.5, 5.0, 300.0]),
            max_restarts=1000,
        )

    def _weather(self) -> Weather:
        pick, chance = self.random.choice, self.random.random
        return Weather(
            step_s=self.step_s,
            token_s=pick([0.0, self.step_s / 20]),
            row_s=pick([0.0, self.step_s / 50]),
            copy_s=pick([self.step_s / 10, self.step_s, 5 * self.step_s]),
            copy_rate=pick([1e4, 1e5, 1e7]),
            spread=pick([0.0, 0.3, 0.9]),
            delay_s=pick([0.0, self.step_s / 20, self.step_s, 3 * self.step_s]),
            copy_failures=0.2 if chance() < 0.25 else 0.0,
            copy_stalls=0.1 if chance() < 0.25 else 0.0,
        )

    # ---- traffic --------------------------------------------------------------------------------

    def _visitors(self) -> tuple[Visitor, ...]:
        """Alone, in bursts, and as the next turn of a chat."""
        count, now, visitors = self.random.randint(*((8, 16) if self.is_pressed else (1, 14))), 0.0, []
        gap_s = self.random.choice([0.2, 1, 5]) * self.step_s
        burst = 0
        for name in range(1, count + 1):
            if burst:
                burst -= 1
            else:
                now += self.random.expovariate(1 / gap_s)
                burst = self.random.randint(1, 5) if self.random.random() < 0.15 else 0
            visitors.append(self._visitor(name, now))
        return tuple(visitors)

    def _visitor(self, name: int, comes_s: float) -> Visitor:
        pick, chance = self.random.choice, self.random.random
        follows = self.random.randrange(1, name) if name > 1 and chance() < 0.15 else None
        return Visitor(
            name=name,
            comes_s=comes_s,
            prompt=self._prompt() if follows is None else tuple(self._tokens(self.random.randint(1, 4))),
            params=self._params(),
            stop_token_ids=(STOP_ID,) if chance() < 0.3 else (),
            text_stop=self.random.randint(5, 12) if chance() < 0.15 else None,
            priority=pick([0, 0, 1, 2]) if self.has_classes else 0,
            tenant=pick([None, "a", "b"]),
            cache_salt=pick([None, None, None, "a", "b"]),
            read_s=pick([0.0, self.step_s, 5 * self.step_s, 1.0]) if self.is_slow else 0.0,
            reads=self.random.randint(0, 8) if self.is_slow and chance() < 0.1 else None,
            leaves_s=self.random.uniform(0, (3 if self.is_sick else 40) * self.step_s) if chance() < self.leave_rate else None,
            leaves_after=self.random.randint(1, 10) if chance() < self.leave_rate else None,
            follows=follows,
            kills=self.has_faults and chance() < 0.03,
        )

    def _params(self) -> SamplingParams:
        pick, chance = self.random.choice, self.random.random
        is_greedy = chance() < 0.5
        return SamplingParams(
            n=pick([1, 1, 1, 1, 2, 3]),
            temperature=0.0 if is_greedy else 1.0,
            seed=None if is_greedy else self.random.randrange(100),
            max_tokens=None
            if chance() < (0.1 if self.is_pressed else 0.02) and self.pool_tokens <= 160
            else self.random.randint(1, 24),
            output_kind=pick(["cumulative", "delta", "delta", "final_only"]),
            # What a device derives from the whole log: it has to come back with it.
            frequency_penalty=pick([0.0] * 7 + [0.5]),
            allowed_token_ids=list(range(0, VOCABULARY, 3)) if chance() < 0.1 else None,
            logprobs=pick([None] * 7 + [2]),
        )

    def _prompt(self) -> tuple[int, ...]:
        """An earlier one again, perhaps with more; or the beginning of a stem, perhaps, and an end of its own."""
        if self.prompts and self.random.random() < self.twin_rate:
            return self.random.choice(self.prompts) + tuple(self._tokens(self.random.choice([0, 0, 1, 5])))
        if self.random.random() < 0.02:
            return tuple(self._tokens(self.pool_tokens + 5))  # it never fits
        length = self.random.randint(1, self.longest)
        shared = self.random.choice(self.stems)[: self.random.randint(0, length)]
        self.prompts.append(tuple(shared + self._tokens(length - len(shared))))
        return self.prompts[-1]

    def _tokens(self, count: int) -> list[int]:
        return [self.random.randrange(VOCABULARY) for _ in range(count)]

    # ---- trouble --------------------------------------------------------------------------------

    def _faults(self, visitors: tuple[Visitor, ...]) -> tuple[Fault, ...]:
        until = visitors[-1].comes_s + 60 * self.step_s
        kinds = self.random.sample(KINDS, self.random.randint(1, 4))
        drawn = [self._fault(self.random.choice(kinds), until, len(visitors)) for _ in range(self.random.randint(1, 6))]
        if self.is_sick:
            sick = [visitor for visitor in visitors if self.random.random() < 0.6]
            drawn += [Fault(at_s=visitor.comes_s, kind="poison", whom=visitor.name) for visitor in sick]
        return tuple(sorted(drawn, key=lambda fault: fault.at_s))

    def _fault(self, kind: FaultKind, until: float, num_visitors: int) -> Fault:
        pick = self.random.choice
        what = {"hang": pick(["step", "step", "out", "in"]), "poison": pick(["", "always"])}.get(kind, "")
        seconds = {"jump": pick([0.1, 2.0, 400.0]), "stall": pick([0.05, 0.5])}.get(kind, 0.0)
        return Fault(
            at_s=self.random.uniform(0, until),
            kind=kind,
            what=what,
            seconds=seconds,
            whom=self.random.randint(1, num_visitors),
        )
