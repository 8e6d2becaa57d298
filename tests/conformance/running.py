"""Requests through a whole engine, and what they should have brought."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from repertory import Engine, EngineConfig, SamplingParams
from repertory.actors.device import DeviceOpener
from repertory.protocol.outputs import EngineStats, RequestOutput

from .prompts import Messages
from .reference import Continuation


@dataclass(frozen=True)
class Case:
    """A prompt as a client sends it, and the reference's answer, which ends early with one of `stop_ids`.

    They are the model's own ends where `ignore_eos` is False, else ids that the client asks for.
    """

    name: str
    prompt: str | Messages | list[int]
    reference: Continuation
    stop_ids: tuple[int, ...] = ()
    ignore_eos: bool = True

    def length(self, max_tokens: int) -> int:
        """Tokens of prompt and answer."""
        return len(self.reference.prompt_ids) + len(self.expected(max_tokens))

    def expected(self, max_tokens: int) -> list[int]:
        """The answer's tokens."""
        return self.reference.until(max_tokens=max_tokens, stop_ids=self.stop_ids)

    def params(self, max_tokens: int) -> SamplingParams:
        """What the client asks for."""
        return SamplingParams(
            temperature=0.0,
            max_tokens=max_tokens,
            ignore_eos=self.ignore_eos,
            stop_token_ids=list(self.stop_ids) if self.ignore_eos else None,
            output_kind="final_only",
        )


async def run_waves(
    config: EngineConfig, waves: Sequence[Sequence[Case]], max_tokens: int, *, open_device: DeviceOpener | None = None
) -> tuple[list[list[RequestOutput]], EngineStats]:
    """Send the waves one after another, the cases of each at once. The engine's books must balance after every wave.

    The statistics are those of the end.
    """
    outputs = []
    async with Engine(config, open_device=open_device) as engine:
        for wave in waves:
            outputs.append(await asyncio.gather(*(_finished(engine, case, max_tokens) for case in wave)))
            assert await engine.audit() == []
        stats = await engine.stats()
        assert stats.num_running == stats.num_waiting == stats.num_preempted == 0
    return outputs, stats


async def _finished(engine: Engine, case: Case, max_tokens: int) -> RequestOutput:
    [output] = [output async for output in engine.generate(case.prompt, case.params(max_tokens))]
    return output


def difference(case: Case, output: RequestOutput, max_tokens: int) -> str | None:
    """Where an output differs from the reference, in words; None where it does not.

    The reference's gap between its two largest logits tells numerics (a gap of 1e-4 or less) from faults.
    """
    expected, found = case.expected(max_tokens), output.outputs[0].token_ids
    if output.prompt_token_ids != case.reference.prompt_ids:
        return f"{case.name}: prompt ids {output.prompt_token_ids}, expected {case.reference.prompt_ids}"
    if found != expected:
        at = next((i for i, (a, b) in enumerate(zip(found, expected, strict=False)) if a != b), min(len(found), len(expected)))
        gap = case.reference.gaps[at] if at < len(case.reference.gaps) else float("nan")
        here = f"from token {at} on {found[at:]}, expected {expected[at:]}"
        return f"{case.name}: {here} (the reference's top-2 gap there: {gap:.2e})"
    reason = "stop" if expected[-1] in case.stop_ids else "length"
    if output.outputs[0].finish_reason != reason:
        return f"{case.name}: ended by {output.outputs[0].finish_reason}, expected {reason}"
    return None


def differences(cases: Sequence[Case], outputs: Sequence[RequestOutput], max_tokens: int) -> list[str]:
    """All of them."""
    pairs = zip(cases, outputs, strict=True)
    return [found for case, output in pairs if (found := difference(case, output, max_tokens)) is not None]
