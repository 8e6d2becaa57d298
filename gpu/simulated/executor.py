"""The simulated device: an executor that computes hashes, in memory that knows its owners.

It does with each step what a device does - take in the deltas, copy, write all rows' KV, then let
each row attend to positions [0, end) through its block table - and checks every one of these reads.
Copies between the tiers move what the blocks hold, right or wrong: the row that reads it finds out.
Nothing is random, so a whole engine runs on it at thousands of steps a second.

Driven by threads it waits for fences, as every device does (`wait_for_fences`). Driven by hand, one
operation after another, it waits for nothing: an operation that would have to raises.

What a real device would not notice raises here. After a step that raised the executor refuses to go
on, since its caller must end the epoch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from ...protocol.ids import BlockId, CopyId, Epoch, SequenceId, StepId
from ...protocol.messages import (
    Barred,
    CopyBlocks,
    CopyDirection,
    CopyDone,
    FailedRow,
    NewRow,
    PromptPart,
    RunStep,
    StepDone,
    TokenLogprobs,
)
from ...protocol.sampling import SamplingParams
from ..copying import carry_out
from ..executor import Capacity
from ..prompts import PromptRow, prompt_rows
from ..sampling_edits import NO_TOKEN_LEFT, NOT_FINITE
from ..slots import Row, Slot, SlotTable
from ..structured import GrammarError, Grammars
from ..timelines import Timelines
from .contents import Contents, Int64Array
from .draw import HashedToken, permitted_tokens
from .fences import check_fences
from .memory import BYTES_PER_SLOT, SimulatedMemory

DEFAULT_NUM_BLOCKS = 1024
DEFAULT_VOCAB_SIZE = 32_000
DEFAULT_MAX_MODEL_LEN = 4096

_STAND_IN = 0
"""Token a failed row leaves in its log, so that the row a next step may already hold is in range."""


@dataclass(kw_only=True, eq=False)
class SimulatedExecutor:
    """Implements `Executor` without a device. Every field but the sizes is a knob for tests, off by default."""

    num_device_blocks: int = DEFAULT_NUM_BLOCKS
    num_host_blocks: int = 0
    block_size: int = 16
    vocab_size: int = DEFAULT_VOCAB_SIZE
    max_model_len: int = DEFAULT_MAX_MODEL_LEN
    block_bytes: int | None = None
    """What the capacity says that a block has and copies count; None: what is really kept of one here."""

    wait_for_fences: bool = False
    """Wait, on the threads of a worker and a swap manager; else an operation that would have to wait raises."""
    reserved_ids: Collection[int] = ()
    """Tokens the hash never gives (end tokens, say)."""
    next_token: Callable[[Sequence[int], Slot], int] | None = None
    """Takes the place of the hash, but for tokens that the request bars: (tokens read back, slot) -> next token."""
    grammars: Grammars | None = None
    """What structured outputs need; closed with the device. None: a sequence that asks for them fails."""
    fail_rows: Callable[[RunStep], Collection[SequenceId]] | None = None
    """Rows of this step that turn NaN. Their sequences stay so until released or admitted again.

    As on any device only a row that samples has logits to look at: one that does not is reported by
    the first that does.
    """
    on_step: Callable[[RunStep], None] | None = None
    """Called with each step, its fences met, before anything of it is applied; may raise."""
    step_seconds: Callable[[RunStep], float] | None = None
    """What `StepDone.seconds` reports; None: the time that the step took here."""
    watch: Callable[[], str | None] | None = None
    """What the device says of other processes that use it."""
    on_copy: Callable[[CopyBlocks], None] | None = None
    """Called with each copy, its fences met, before it is applied; may raise, which fails it, or block."""
    fail_copies: Callable[[CopyBlocks], bool] | None = None
    """Copies that fail. A failed one leaves junk in its targets."""
    copy_seconds: Callable[[CopyBlocks], float] | None = None
    """What `CopyDone.seconds` reports; None: the time that the copy took here."""
    real_time: bool = False
    """Sleep until `step_seconds`, and `copy_seconds`, have passed."""
    record: bool = False
    """Keep `steps` and `copies`."""
    epoch: Epoch | None = None
    """The epoch of all steps; None: that of the first one."""

    num_computed_tokens: int = field(default=0, init=False)
    """Tokens whose KV was computed, over all steps."""
    steps: list[tuple[StepId, list[tuple[SequenceId, int, int]]]] = field(default_factory=list, init=False)
    """With `record`: each step's id and its rows (sequence, start, number of tokens)."""
    copies: list[CopyBlocks] = field(default_factory=list, init=False)
    """With `record`: the copies that were carried out, well or not, in that order."""

    def __post_init__(self) -> None:
        if self.real_time and self.step_seconds is None and self.copy_seconds is None:
            raise ValueError("real_time needs step_seconds or copy_seconds: there is no duration to keep")
        self.memory = SimulatedMemory(self.num_device_blocks, self.block_size)
        self.host_memory = SimulatedMemory(self.num_host_blocks, self.block_size)
        self._timelines = Timelines()
        self._last_copy: dict[CopyDirection, CopyId] = {"out": CopyId(0), "in": CopyId(0)}
        self._hashed = HashedToken(self.vocab_size, self.reserved_ids)
        self._slots = SlotTable(self.grammars)
        self._contents: dict[SequenceId, Contents] = {}
        self._failed: dict[SequenceId, str] = {}
        self._last_step = StepId(0)
        self._unusable: str | None = None

    @property
    def capacity(self) -> Capacity:
        """What was asked for at construction."""
        return Capacity(
            device="simulated",
            num_device_blocks=self.num_device_blocks,
            num_host_blocks=self.num_host_blocks,
            block_size=self.block_size,
            block_bytes=self.block_bytes or self.block_size * BYTES_PER_SLOT,
            vocab_size=self.vocab_size,
            max_model_len=self.max_model_len,
        )

    @property
    def num_sequences(self) -> int:
        """Sequences admitted and not released."""
        return len(self._slots)

    def run_step(self, step: RunStep) -> StepDone:
        """Run `step` as `Executor.run_step` says.

        Raises `MemoryFault` where a row reads or writes memory it must not, `ValueError` or `KeyError`
        for a step that is out of order, of another epoch or at odds with the log, and `RuntimeError`
        after an earlier exception or `close`.
        """
        if self._unusable is not None:
            raise RuntimeError(f"step {step.step_id}: the executor is not usable, {self._unusable}")
        try:
            self._check_order(step)
            if not self.wait_for_fences:
                check_fences(self._timelines, step.after, f"step {step.step_id}")
            with self._timelines.operation("step", step.step_id, step.after) as waited_s:
                return replace(self._run_step(step), waited_s=waited_s)
        except BaseException:
            self._unusable = f"step {step.step_id} failed"
            raise

    def copy_blocks(self, copy: CopyBlocks) -> CopyDone:
        """Copy blocks between the tiers as `Executor.copy_blocks` says.

        Raises `ValueError` for a copy that is out of order on its lane or of another epoch.
        """
        self._check_copy_order(copy)
        if not self.wait_for_fences:
            check_fences(self._timelines, copy.after, f"copy {copy.direction} {copy.copy_id}")
        seconds = None if self.copy_seconds is None else self.copy_seconds(copy)
        done = carry_out(copy, self._timelines, self.capacity, lambda copy: self._copy(copy, seconds))
        return done if seconds is None else replace(done, seconds=seconds)

    def interrupt(self) -> None:
        """End all waiting; see `Executor.interrupt`."""
        self._timelines.close()

    def reference(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        num_tokens: int,
        *,
        index: int = 0,
        barred: Barred | None = None,
    ) -> list[int]:
        """The first `num_tokens` tokens of a request run alone, computed without memory.

        `index` is the sequence's number within its request. No stop is applied: a device knows none. Raises `ValueError`
        where the request bars every token.
        """
        row = NewRow(SequenceId(0), list(prompt_ids), len(prompt_ids), params, [], index=index, barred=barred)
        slot = Slot(row, None if self.grammars is None else self.grammars.begin(row))
        contents = Contents(0, slot.token_ids)
        for _ in range(num_tokens):
            token = self._next_token(contents.tokens(), slot)
            if token is None:
                raise ValueError(NO_TOKEN_LEFT)
            _append(slot, token)
            contents.extend([token])
        return slot.token_ids[len(prompt_ids) :]

    def close(self) -> None:
        """Forget everything. A later `run_step` raises, a later copy fails."""
        self.interrupt()
        self._unusable = "it is closed"
        if self.grammars is not None:
            self.grammars.close()
        self._slots = SlotTable()
        self._contents.clear()
        self.memory = SimulatedMemory(0, self.block_size)
        self.host_memory = SimulatedMemory(0, self.block_size)

    def _check_epoch(self, epoch: Epoch, operation: str) -> None:
        if self.epoch is None:
            self.epoch = epoch
        if epoch != self.epoch:
            raise ValueError(f"{operation} is of epoch {epoch}, this device's is {self.epoch}")

    def _check_copy_order(self, copy: CopyBlocks) -> None:
        operation, last = f"copy {copy.direction} {copy.copy_id}", self._last_copy[copy.direction]
        self._check_epoch(copy.epoch, operation)
        if copy.copy_id != last + 1:
            raise ValueError(f"{operation} follows number {last} of its lane")
        self._last_copy[copy.direction] = copy.copy_id

    def _check_order(self, step: RunStep) -> None:
        self._check_epoch(step.epoch, f"step {step.step_id}")
        if step.step_id != self._last_step + 1:
            raise ValueError(f"step {step.step_id} follows step {self._last_step}")
        if step.after.step >= step.step_id:
            raise ValueError(f"step {step.step_id} waits for step {step.after.step}, which cannot come before it")
        self._last_step = step.step_id

    def _run_step(self, step: RunStep) -> StepDone:
        started = time.perf_counter()
        if self.on_step is not None:
            self.on_step(step)
        rows = self._take_in(step)
        for copy in step.copies:
            self.memory.copy(copy.source, copy.target, copy.num_tokens)
        self._write(rows)
        seq_ids, token_ids, failed, logprobs = self._attend(rows)
        prompts = [self._prompt_part(asking) for asking in prompt_rows(rows) if asking.row.slot.seq_id not in self._failed]
        seconds = time.perf_counter() - started
        if self.step_seconds is not None:
            seconds = self._spend(self.step_seconds(step), seconds)
        logprobs = logprobs if any(logprobs) else []
        return StepDone(step.epoch, step.step_id, seq_ids, token_ids, seconds, failed, logprobs=logprobs, prompts=prompts)

    def _prompt_part(self, asking: PromptRow) -> PromptPart:
        slot, first = asking.row.slot, asking.first
        end = first + len(asking.targets)
        read = self.memory.read_back(slot.block_table, self._contents[slot.seq_id], end=end - 1, reader=slot.seq_id)
        return PromptPart(
            slot.seq_id, first, [self.prompt_logprobs(read[:at], slot, slot.token_ids[at]) for at in range(first, end)]
        )

    def prompt_logprobs(self, tokens: Int64Array, slot: Slot, token: int) -> TokenLogprobs:
        """How likely the prompt token `token` of `slot` was after `tokens`, int64 [n]."""
        return self._hashed.logprobs(tokens, slot, token, slot.params.prompt_logprobs)

    def _copy(self, copy: CopyBlocks, seconds: float | None) -> None:
        source, target = (self.memory, self.host_memory) if copy.direction == "out" else (self.host_memory, self.memory)
        if self._unusable is not None:
            raise RuntimeError(f"the executor is not usable, {self._unusable}")
        started = time.perf_counter()
        try:
            if self.record:
                self.copies.append(copy)
            if self.on_copy is not None:
                self.on_copy(copy)
            if seconds is not None:
                self._spend(seconds, time.perf_counter() - started)
            if self.fail_copies is not None and self.fail_copies(copy):
                raise RuntimeError("the simulated copy failed")
            # At the end: what meanwhile overwrote a source, or read or wrote a target, is then found out.
            target.copy_blocks_from(source, copy.sources, copy.targets)
        except BaseException:
            for block in copy.targets:
                target.spoil(block, copy.copy_id)
            raise

    def _spend(self, seconds: float, elapsed: float) -> float:
        if self.real_time and seconds > elapsed:
            time.sleep(seconds - elapsed)
        return seconds

    def _take_in(self, step: RunStep) -> list[Row]:
        """Apply the step's deltas; return its rows, checked."""
        if len(set(step.seq_ids)) != len(step.seq_ids):
            raise ValueError(f"step {step.step_id} has two rows of one sequence: {step.seq_ids}")
        rows = self._slots.apply(step)
        for seq_id in step.released:
            self._contents.pop(seq_id, None)
            self._failed.pop(seq_id, None)
        for new in step.admitted:
            self._check_tokens(new.token_ids, new.seq_id)
            self._contents[new.seq_id] = Contents(new.namespace, new.token_ids)
            self._failed.pop(new.seq_id, None)
            if new.params.structured_outputs is not None and self.grammars is None:
                self._failed[new.seq_id] = "structured_outputs is not supported by a simulated device without a tokenizer"
        for row in rows:
            self._check_row(row)
        self._check_groups(step, rows)
        if self.fail_rows is not None:
            self._failed.update(dict.fromkeys(set(self.fail_rows(step)) & set(step.seq_ids), NOT_FINITE))
        if self.record:
            self.steps.append((step.step_id, list(zip(step.seq_ids, step.starts, step.num_tokens, strict=True))))
        return rows

    def _check_tokens(self, tokens: Sequence[int], seq_id: SequenceId) -> None:
        if tokens and not 0 <= min(tokens) <= max(tokens) < self.vocab_size:
            wrong = next(token for token in tokens if not 0 <= token < self.vocab_size)
            raise ValueError(f"sequence {seq_id}: token {wrong} is outside the vocabulary of {self.vocab_size}")

    def _check_row(self, row: Row) -> None:
        slot, start, end, samples = row
        if start < 0 or end > self.max_model_len:
            raise ValueError(f"sequence {slot.seq_id}: row [{start}, {end}) of a model of {self.max_model_len} positions")
        if samples not in (0, 1):
            raise ValueError(f"sequence {slot.seq_id}: {samples} samples of one row")
        if samples and end != len(slot.token_ids):
            raise ValueError(f"sequence {slot.seq_id}: samples after {end} tokens of a log of {len(slot.token_ids)}")

    def _check_groups(self, step: RunStep, rows: list[Row]) -> None:
        """Rows attended as a group must find the same blocks in front, and all of them within their context."""
        for members, num_blocks in step.shared_groups:
            shared: list[BlockId] = rows[members[0]].slot.block_table[:num_blocks]
            for row in (rows[member] for member in members):
                if row.slot.block_table[:num_blocks] != shared or num_blocks * self.block_size > row.end:
                    raise ValueError(f"sequence {row.slot.seq_id} does not share {num_blocks} blocks with its group")

    def _write(self, rows: list[Row]) -> None:
        self.memory.begin_step()
        for slot, start, end, _ in rows:
            contents = self._contents[slot.seq_id]
            self.memory.write(slot.block_table, contents, start=start, end=end, writer=slot.seq_id)
            self.num_computed_tokens += end - start

    def _attend(self, rows: list[Row]) -> tuple[list[SequenceId], list[int], list[FailedRow], list[TokenLogprobs | None]]:
        """Let every row read its context and sample. Returns the sampled columns, the failed rows, and the logprobs."""
        seq_ids: list[SequenceId] = []
        token_ids: list[int] = []
        failed: list[FailedRow] = []
        logprobs: list[TokenLogprobs | None] = []
        for slot, _, end, samples in rows:
            contents = self._contents[slot.seq_id]
            read = self.memory.read_back(slot.block_table, contents, end=end, reader=slot.seq_id)
            if not samples:
                continue
            token = None if slot.seq_id in self._failed else self._sampled(read, slot)
            if token is None:
                reason = self._failed.setdefault(slot.seq_id, NO_TOKEN_LEFT)
                failed.append(FailedRow(slot.seq_id, reason, is_sound=reason != NOT_FINITE))
                token = _STAND_IN
                slot.token_ids.append(token)
            else:
                _append(slot, token)
                seq_ids.append(slot.seq_id)
                token_ids.append(token)
                logprobs.append(None if slot.params.logprobs is None else self._hashed.logprobs(read, slot, token))
            contents.extend([token])
        return seq_ids, token_ids, failed, logprobs

    def _sampled(self, tokens: Int64Array, slot: Slot) -> int | None:
        """The next token; None if there is none, or if the sequence's grammar fails, which fails the sequence."""
        try:
            return self._next_token(tokens, slot)
        except GrammarError as error:
            self._failed[slot.seq_id] = str(error)
            return None

    def _next_token(self, tokens: Int64Array, slot: Slot) -> int | None:
        """None: the request bars all."""
        if self.next_token is None:
            return self._hashed.draw(tokens, slot)
        token = self.next_token(tokens.tolist(), slot)
        self._check_tokens([token], slot.seq_id)
        permitted = permitted_tokens(slot, self.vocab_size)
        return token if permitted is None or permitted[token] else self._hashed.draw(tokens, slot)


def _append(slot: Slot, token: int) -> None:
    slot.token_ids.append(token)
    if slot.grammar is not None:
        slot.grammar.accept(token)
