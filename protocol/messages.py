"""The messages, in the order a request meets them.

Requests to an actor are imperative (`Submit`, `RunStep`), facts are in the past tense
(`StepDone`, `TokensSampled`). They are frozen, tagged and array-like: in one process they travel
by reference, between processes as msgpack, the same types either way. They carry deltas, not
state, and the per-step ones carry columns: one message a step, never one a token.

    frontend  --Submit, Abort-->  Tokenizer  --Admit, Abort-->  Scheduler
    Scheduler --RunStep-------->  Worker     --StepDone------>  Scheduler
    Scheduler --CopyBlocks----->  SwapManager --CopyDone----->  Scheduler
    Scheduler --TokensSampled-->  Detokenizer --TextOut------>  frontend
    Tokenizer --Tokenized------>  frontend                      (what the prompt became)
    Tokenizer, Scheduler --Refused--> Detokenizer               (ends that never opened)
    Detokenizer --Abort(stop), Closed, Resend-->  Scheduler
    frontend  --Credit--------->  Scheduler
    link of many frontends  --FrontendLost-->  Scheduler
    device host --DeviceOpened, Heartbeat, StepDone, CopyDone, DeviceShared-->  its keeper
    keeper --StepDone, CopyDone, DeviceShared, DeviceLost, DeviceReady-->  Scheduler

Times are seconds on the sending process's monotonic clock unless a name says otherwise.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from .capacity import Capacity
from .config import EngineConfig
from .conversation import Conversation
from .errors import Problem
from .ids import BlockId, CopyId, Epoch, RequestId, SequenceId, StepId
from .journey import Journey
from .sampling import FinishReason, SamplingParams


class Message(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True, gc=False, tag=True):
    """Base of all messages: immutable, tagged with its class name."""


class Columns(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True, gc=False):
    """Base of the parts of a message; untagged, since the message says what they are."""


# ---- from the frontend to the tokenizer ---------------------------------------------------------


class Submit(Message, frozen=True):
    """A client wants tokens. `prompt` is text, token ids, or chat messages, as the client gave it."""

    request_id: RequestId
    label: str
    prompt: str | list[int] | list[dict[str, Any]] | Conversation
    params: SamplingParams
    arrival_s: float
    priority: int = 0
    tenant: str | None = None
    cache_salt: str | None = None
    trace_context: dict[str, str] | None = None


class Abort(Message, frozen=True):
    """Stop work on a request. Takes the same path as its `Submit`; unknown ids are a no-op.

    `reason` "stop" and "error" are the Detokenizer's: a stop string ended the sequence `index`, or its text
    could not be made; either way its end has been delivered, and the request's other sequences go on.
    """

    request_id: RequestId
    reason: str = "abort"
    index: int | None = None
    """The sequence that is meant; None: all of the request."""


class Tokenized(Message, frozen=True):
    """Tells the frontend what the prompt became, for `RequestOutput`."""

    request_id: RequestId
    prompt: str | None
    token_ids: list[int]


# ---- to the scheduler ---------------------------------------------------------------------------


class Barred(Columns, frozen=True):
    """Token ids that a sequence may not choose, as its parameters and the model's tokenizer have it.

    `ends` not before `params.min_tokens` tokens of output; the last id of each of `bad_words` never after the others of it.
    """

    ends: list[int] = []
    bad_words: list[list[int]] = []


class Admit(Message, frozen=True):
    """A validated request. `params` is resolved: its seed is set, its stop ids include the model's ends."""

    request_id: RequestId
    label: str
    token_ids: list[int]
    params: SamplingParams
    arrival_s: float
    stop_token_ids: list[int] = []
    priority: int = 0
    tenant: str | None = None
    cache_salt: str | None = None
    trace_context: dict[str, str] | None = None
    holds: bool = False
    """It does not end with its last token, but keeps its KV for those that follow it, until it is aborted.

    It is a part of something larger (a beam search), so no account of it is written.
    """
    follows: RequestId | None = None
    """A request that holds, whose prompt this one goes on from by a token: it copies what fills no block."""
    barred: Barred | None = None


class Credit(Message, frozen=True):
    """A reader has taken `num_tokens` output tokens of a sequence: as many more may be generated for it."""

    request_id: RequestId
    num_tokens: int
    index: int = 0


class Resend(Message, frozen=True):
    """The detokenizer has lost a request's state: say everything about it again, from its `Open` on."""

    request_id: RequestId


class Closed(Message, frozen=True):
    """The terminals of these requests are out: nothing of them will be asked for again.

    `handed` has, beside each of `request_ids`, when its last text had been made and when it had been handed over.
    """

    request_ids: list[RequestId]
    handed: list[tuple[float, float]] = []


class FrontendLost(Message, frozen=True):
    """A frontend process is gone: nobody reads its requests any more, and nothing of them will be asked for again."""

    incarnation: int


class Refused(Message, frozen=True):
    """A request ends before it opened: refused (`problem`), or aborted while it waited (None)."""

    request_id: RequestId
    problem: Problem | None = None


# ---- between the scheduler and the device -------------------------------------------------------


CopyDirection = Literal["out", "in"]


class Fences(Columns, frozen=True):
    """The last operation on each timeline that must be complete before this one starts."""

    step: StepId = StepId(0)
    copy_out: CopyId = CopyId(0)
    copy_in: CopyId = CopyId(0)


class NewRow(Columns, frozen=True):
    """A sequence comes to the worker, or comes back: its whole state, once.

    `token_ids` is the log (prompt and generated), `block_table` the device blocks that hold it.
    `index` is the sequence's number within its request; with `params.seed` and the output
    position it names the random number of each draw.
    """

    seq_id: SequenceId
    token_ids: list[int]
    num_prompt_tokens: int
    params: SamplingParams
    block_table: list[BlockId]
    index: int = 0
    namespace: int = 0
    barred: Barred | None = None


class TableEdit(Columns, frozen=True):
    """`block_table[first : first + len(block_ids)] = block_ids`, growing the table where it ends."""

    seq_id: SequenceId
    first: int
    block_ids: list[BlockId]


class BlockCopy(Columns, frozen=True):
    """Copy the first `num_tokens` slots of a device block, all layers, before layer 0 of the step."""

    source: BlockId
    target: BlockId
    num_tokens: int


class RunStep(Message, frozen=True):
    """One model step. The device applies, in this order: `released`, `admitted`, `table_edits`, `copies`, rows.

    Copies run one after the other in list order: a later one may overwrite the source of an earlier one.
    Row i computes `num_tokens[i]` tokens of sequence `seq_ids[i]` from position `starts[i]` on:
    their KV is written (all rows' before any row attends, in every layer), and where `samples[i]`
    is 1 the next token is drawn from the last one's logits and appended to the sequence's log on
    the device. A sequence has at most one row in a step, and no row is empty.
    `shared_groups` are row sets that share a run of leading blocks: (row indices, number of blocks).
    """

    epoch: Epoch
    step_id: StepId
    after: Fences
    seq_ids: list[SequenceId]
    starts: list[int]
    num_tokens: list[int]
    samples: list[int]
    admitted: list[NewRow] = []
    released: list[SequenceId] = []
    table_edits: list[TableEdit] = []
    copies: list[BlockCopy] = []
    shared_groups: list[tuple[list[int], int]] = []


class CopyBlocks(Message, frozen=True):
    """Copy whole KV blocks, all layers, between the tiers: "out" is device to host, "in" is host to device.

    `copy_id` is its number on its lane's timeline; each lane runs its copies in the order of their numbers, each
    once everything that `after` names is complete. Block `sources[i]` goes to `targets[i]` of the other tier.
    """

    epoch: Epoch
    copy_id: CopyId
    direction: CopyDirection
    after: Fences
    sources: list[BlockId]
    targets: list[BlockId]


class CopyDone(Message, frozen=True):
    """A copy ended, well (`ok`) or not. Either way its fence is complete; what a failed one wrote is junk.

    `seconds` is the time it copied, `waited_s` the time it waited for its fences before.
    """

    epoch: Epoch
    copy_id: CopyId
    direction: CopyDirection
    num_bytes: int
    seconds: float
    waited_s: float = 0.0
    ok: bool = True
    reason: str = ""
    """What went wrong, in words."""


class FailedRow(Columns, frozen=True):
    """A row whose logits were not finite, left no token to choose from, or whose grammar failed.

    Its sequence ends with an error; the others do not notice.
    """

    seq_id: SequenceId
    message: str
    is_sound: bool = False
    """Its KV may be shared: the logits were finite, and what it asked for is at fault."""


class TokenLogprobs(Columns, frozen=True):
    """What one token was drawn from: natural logarithms of the model's own probabilities.

    The sampled token is the first of `token_ids`, and is `rank`-th of the vocabulary (the most likely has rank 1);
    the others are the most likely ones, in falling order, the sampled one again where it is among them. `texts` are
    the tokens decoded one by one: the detokenizer's, empty before it.
    """

    token_ids: list[int]
    logprobs: list[float]
    rank: int
    texts: list[str] = []


class PromptPart(Columns, frozen=True):
    """How likely some tokens of a sequence's prompt were: those from position `first` on, of which none is the very first."""

    seq_id: SequenceId
    first: int
    entries: list[TokenLogprobs]


class StepDone(Message, frozen=True):
    """A step ended. `seq_ids` and `token_ids` are the sampled tokens as columns, in row order."""

    epoch: Epoch
    step_id: StepId
    seq_ids: list[SequenceId]
    token_ids: list[int]
    seconds: float
    failed: list[FailedRow] = []
    num_sequences: int = 0
    """Sequences the device remembers after the step."""
    waited_s: float = 0.0
    """Seconds it waited for copies before it began; not part of `seconds`."""
    logprobs: list[TokenLogprobs | None] = []
    """A column beside `token_ids`: None where none are asked for. Empty where nobody asks."""
    prompts: list[PromptPart] = []
    """For rows whose requests ask for it: the prompt tokens that follow on those that the row computed."""


class StepFailed(Message, frozen=True):
    """A step raised: the device's state is not to be trusted any more and its epoch ends."""

    epoch: Epoch
    step_id: StepId
    problem: Problem


# ---- the life of a device host -------------------------------------------------------------------


class OpenDevice(Message, frozen=True):
    """The first message to a device host: what to open. Its steps and answers carry `epoch`."""

    epoch: Epoch
    config: EngineConfig
    model_dir: str


class DeviceOpened(Message, frozen=True):
    """The device is open and takes steps. Sent once."""

    epoch: Epoch
    capacity: Capacity


class OpeningFailed(Message, frozen=True):
    """The device cannot be opened; the host ends."""

    problem: Problem


class Heartbeat(Message, frozen=True):
    """The device host's loop is alive. Sent several times within `heartbeat_timeout_s`."""

    epoch: Epoch


class DeviceShared(Message, frozen=True):
    """Another process has come to use the device, or has gone: how fast copies are has to be measured again."""

    epoch: Epoch
    reason: str


class DeviceLost(Message, frozen=True):
    """The device host of this epoch is gone, and with it both tiers of KV and every step it was sent."""

    epoch: Epoch
    reason: str


class DeviceReady(Message, frozen=True):
    """A new device host has taken over: steps of this epoch may be sent."""

    epoch: Epoch


# ---- to the detokenizer and back to the frontend -------------------------------------------------


PROMPT_TAIL = 24
"""How many of the prompt's last ids the detokenizer wants: enough to hold a whole character and some text
before it, even where a character takes four ids and special tokens stand at the end."""


class Open(Columns, frozen=True):
    """Precedes a request's first token: what its text machine needs, and how it came to run.

    `prompt_tail` is the end of the prompt's ids, so that the first piece joins it correctly. The request's
    `params.n` sequences are all open from here on.
    """

    request_id: RequestId
    prompt_tail: list[int]
    params: SamplingParams
    num_prompt_tokens: int
    num_cached_tokens: int
    queued_s: float
    first_scheduled_s: float


ALL_SEQUENCES = -1
"""The index that means every sequence of a request that has not ended."""


class SequenceEnd(Columns, frozen=True):
    """The scheduler's proposal that a sequence ends with the tokens of this message.

    A stop string completed by an earlier token, or by the last one, wins over it. `num_preemptions` are the
    request's so far.
    """

    request_id: RequestId
    finish_reason: FinishReason
    stop_token_id: int | None = None
    problem: Problem | None = None
    num_preemptions: int = 0
    index: int = 0
    """The sequence, or `ALL_SEQUENCES` where the request ends as a whole, opened or not."""
    journey: Journey | None = None
    """With the last of a request: what held it, up to here."""


class PromptLogprobs(Columns, frozen=True):
    """How likely a request's prompt was, token by token from the second on."""

    request_id: RequestId
    entries: list[TokenLogprobs]


class TokensSampled(Message, frozen=True):
    """A step's new tokens, as columns, with the requests that opened before and the sequences that ended with them."""

    request_ids: list[RequestId]
    token_ids: list[int]
    sampled_s: float
    opened: list[Open] = []
    ended: list[SequenceEnd] = []
    preempted: list[tuple[RequestId, int]] = []
    """Requests that gave their blocks up since the last message, and how often their sequences have by now."""
    indices: list[int] = []
    """A column beside `token_ids`: the sequence within its request. Empty where all are the first."""
    logprobs: list[TokenLogprobs | None] = []
    """A column beside `token_ids`, as in `StepDone`."""
    prompts: list[PromptLogprobs] = []
    """Of requests that ask for it, with the first token of their first sequence."""


class Metrics(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """When things happened to a request, in monotonic seconds of the engine's process; None: not yet."""

    arrival: float
    queued: float | None = None
    first_scheduled: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    finished: float | None = None
    num_preemptions: int = 0


class TextDelta(Columns, frozen=True):
    """New text and tokens of one sequence; `finish_reason` is its end.

    With the end of the last one (`num_left` is 0) it is the one terminal of the request.
    """

    request_id: RequestId
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    problem: Problem | None = None
    num_cached_tokens: int = 0
    metrics: Metrics | None = None
    index: int = 0
    num_left: int = 0
    """With a `finish_reason`: sequences of the request that go on."""
    logprobs: list[TokenLogprobs] = []
    """Of `token_ids`, where they are asked for."""
    prompt_logprobs: list[TokenLogprobs] | None = None
    """Of the request's prompt from its second token on, once, where they are asked for."""
    journey: Journey | None = None
    """Of a request that ends with this, unless a stop string ended it: what held it, up to its last token."""

    @property
    def is_terminal(self) -> bool:
        """Whether the request ends with it."""
        return self.finish_reason is not None and not self.num_left


class TextOut(Message, frozen=True):
    """A step's new text for one frontend."""

    deltas: list[TextDelta]
