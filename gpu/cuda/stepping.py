"""A step on the device: its inputs taken over, the model run, tokens drawn - in work that never waits.

All of it is at fixed addresses, with room for the largest step, so that a decode step of a given size can be captured
once and run again with other contents. What the host decides is decided in `stage`, before anything is launched.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ...protocol.messages import BlockCopy
from ..sampling import SamplingRow
from .attention.contract import AttentionBackend, AttentionInputs, SharedRun
from .decoder import GpuDecoder, TokenInputs
from .draws import Column, DeviceSampler, DrawParameters
from .glue import Glue
from .plan import NOWHERE, GpuPlan
from .pools import DevicePool, independent
from .runtime import Runtime
from .staging import Section, StagedTables, Staging

_COPIES_PER_ROW = 2
"""Copies within the pool before a row: of what it shares in part with the cache, and with a sibling."""


class Limits(NamedTuple):
    """The largest step: tokens, rows, blocks of a row. There are no more rows than tokens."""

    num_tokens: int
    num_rows: int
    table_width: int


class Staged(NamedTuple):
    """A step that lies in pinned memory, ready to be launched. `turn` says in which buffer."""

    turn: int
    num_tokens: int
    num_rows: int
    num_samples: int
    copy_runs: list[tuple[int, int]]
    copy_tables: Callable[[], None]


class StepRunner:
    """Stages and launches steps over one pool. The compute thread calls it; what is named `launch_` runs in a stream.

    Two steps may be staged and not over; a third needs the first to be.
    """

    def __init__(
        self,
        runtime: Runtime,
        decoder: GpuDecoder,
        pool: DevicePool,
        *,
        attention: AttentionBackend,
        glue: Glue,
        sampler: DeviceSampler,
        limits: Limits,
    ) -> None:
        self.limits = limits
        self.attention = attention
        self._decoder, self._pool = decoder, pool
        self._glue, self._sampler = glue, sampler
        tokens, rows = limits.num_tokens, limits.num_rows
        self._staging = Staging(
            runtime,
            {
                "token_ids": Section((tokens,), torch.int32),
                "from_sample": Section((tokens,), torch.int32),
                "positions": Section((tokens,), torch.int64),
                "slots": Section((tokens,), torch.int64),
                "context_lens": Section((rows,), torch.int32),
                "query_starts": Section((rows + 1,), torch.int32),
                "sample_at": Section((rows,), torch.int64),
                "draws": Section((len(Column), rows), torch.int64),
                "run_members": Section((rows,), torch.int32),
                "copies": Section((3, _COPIES_PER_ROW * rows), torch.int64),
            },
        )
        self._staging.tensors["context_lens"].fill_(1)  # of what is captured before there was a step: no row has no key
        self._draws = [DrawParameters(host["draws"]) for host in self._staging.hosts]
        self._tables = StagedTables(runtime, max_rows=rows, max_width=limits.table_width)
        self._outcome = torch.zeros((2, rows), dtype=torch.int32, device=runtime.device)
        self._outcomes = [runtime.pinned((2, rows), torch.int32).zero_() for _ in range(2)]

    # ---- on the host ----------------------------------------------------------------------------

    def stage(
        self, turn: int, plan: GpuPlan, draws: Sequence[SamplingRow], copies: Sequence[BlockCopy], *, padded_to: int = 0
    ) -> Staged:
        """Write step `turn` into its buffer. `padded_to`: rows of the captured step that runs it, if one does.

        Raises `ValueError` for a step beyond the limits.
        """
        self._check(plan, copies)
        arrays = self._staging.arrays(turn)
        tokens, rows, samples = len(plan.token_ids), len(plan.rows), len(plan.sampling)
        for name in ("token_ids", "from_sample", "positions", "slots"):
            arrays[name][:tokens] = getattr(plan, name)
        arrays["context_lens"][:rows] = plan.context_lens
        arrays["query_starts"][: rows + 1] = plan.query_starts
        arrays["sample_at"][:samples] = plan.sample_at
        for name, filler in (("token_ids", 0), ("from_sample", -1), ("positions", 0), ("slots", NOWHERE)):
            arrays[name][tokens:padded_to] = filler
        if padded_to > rows:
            arrays["context_lens"][rows:padded_to] = 1
            arrays["query_starts"][rows : padded_to + 1] = range(rows, padded_to + 1)
        self._draws[turn % 2].write(draws)
        members = [member for run, _ in plan.runs for member in run]
        arrays["run_members"][: len(members)] = members
        for column, values in enumerate(zip(*((copy.source, copy.target, copy.num_tokens) for copy in copies), strict=True)):
            arrays["copies"][column, : len(copies)] = values
        return Staged(turn, tokens, rows, samples, independent(copies), self._tables.write(turn, plan.block_tables))

    def outcome(self, staged: Staged) -> tuple[list[int], list[int]]:
        """The tokens and statuses that a step drew; once it is over."""
        tokens, statuses = self._outcomes[staged.turn % 2][:, : staged.num_samples].tolist()
        return tokens, statuses

    def _check(self, plan: GpuPlan, copies: Sequence[BlockCopy]) -> None:
        limits = self.limits
        for what, count, limit in (
            ("tokens", len(plan.token_ids), limits.num_tokens),
            ("rows", len(plan.rows), limits.num_rows),
            ("blocks in a row", plan.block_tables.shape[1], limits.table_width),
            ("copies", len(copies), _COPIES_PER_ROW * limits.num_rows),
        ):
            if count > limit:
                raise ValueError(f"a step of {count} {what}; this device was opened for {limit}")

    def warm_up(self) -> None:
        """Get ready for every kind of step, in a stream's `launch`. Reads and writes block 0 at most."""
        self.attention.warm_up(self._pool.caches[0], self._decoder.dtype)
        nothing = torch.zeros((3, 1), dtype=torch.int64, device=self._outcome.device)
        self._pool.copy(nothing, [(0, 1)], self._glue)

    # ---- in the compute stream ------------------------------------------------------------------

    def launch_inputs(self, staged: Staged) -> None:
        """Take over what was staged, and make the step's copies within the pool."""
        self._staging.copy_over(staged.turn)
        staged.copy_tables()
        self._pool.copy(self._staging.tensors["copies"], staged.copy_runs, self._glue)

    def launch_hidden(self, num_tokens: int, inputs: AttentionInputs) -> Tensor:
        """Run the model over the step's tokens: [tokens, hidden_size]."""
        staged = self._staging.tensors
        source = staged["from_sample"][:num_tokens]
        drawn = self._outcome[0].index_select(0, source.clamp(min=0))
        token_ids = torch.where(source >= 0, drawn, staged["token_ids"][:num_tokens])
        tokens = TokenInputs(token_ids, staged["positions"][:num_tokens], staged["slots"][:num_tokens])
        return self._decoder.hidden(tokens, self._pool.caches, self.attention, inputs)

    def launch_logits(self, hidden: Tensor, num_samples: int) -> Tensor:
        """Logits [samples, vocab_size] of the tokens that draws follow on, in the model's dtype."""
        return self._decoder.head(hidden.index_select(0, self._staging.tensors["sample_at"][:num_samples]))

    def launch_head(self, hidden: Tensor) -> Tensor:
        """Logits of rows of `hidden`, in the model's dtype."""
        return self._decoder.head(hidden)

    def launch_draws(self, logits: Tensor) -> None:
        """Draw a token for each row of `logits`, where the next step finds it."""
        tokens, statuses = self._outcome
        self._sampler.draw(logits, self._staging.tensors["draws"], num_rows=len(logits), tokens=tokens, statuses=statuses)

    def launch_outcome(self, staged: Staged) -> None:
        """Tell the host what was drawn."""
        self._outcomes[staged.turn % 2].copy_(self._outcome, non_blocking=True)

    def launch_decode(self, num_rows: int, max_context_len: int) -> None:
        """The whole of a step of `num_rows` decode rows, from staged inputs to drawn tokens: what graphs capture."""
        hidden = self.launch_hidden(num_rows, self.decode_inputs(num_rows, max_context_len))
        self.launch_draws(self._decoder.head(hidden))

    # ---- as attention sees it -------------------------------------------------------------------

    def decode_inputs(self, num_rows: int, max_context_len: int) -> AttentionInputs:
        """A step of decode rows alone, whatever is staged."""
        staged = self._staging.tensors
        return AttentionInputs(
            block_tables=self._tables.tensor[:num_rows],
            context_lens=staged["context_lens"][:num_rows],
            query_starts=staged["query_starts"][: num_rows + 1],
            num_decodes=num_rows,
            num_chunks=0,
            num_chunk_tokens=0,
            max_query_len=1,
            max_context_len=max_context_len,
        )

    def inputs(self, plan: GpuPlan) -> AttentionInputs:
        """The step that `plan` describes."""
        staged, rows = self._staging.tensors, len(plan.rows)
        runs: list[SharedRun] = []
        first = 0
        for members, num_keys in plan.runs:
            runs.append(SharedRun(staged["run_members"][first : first + len(members)], len(members), num_keys))
            first += len(members)
        return AttentionInputs(
            block_tables=self._tables.tensor[:rows, : plan.block_tables.shape[1]],
            context_lens=staged["context_lens"][:rows],
            query_starts=staged["query_starts"][: rows + 1],
            num_decodes=plan.num_decodes,
            num_chunks=rows - plan.num_decodes,
            num_chunk_tokens=len(plan.token_ids) - plan.num_decodes,
            max_query_len=plan.max_query_len,
            max_context_len=plan.max_context_len,
            shared_runs=runs,
        )
