"""Every structured event there is: its name, its level, what it means, and its fields with their units.

Names are stable: dashboards and alerts are built on them. A field that is added here is fine; one
that is renamed or removed is a breaking change. Besides its own fields every line has `event`,
`level`, `timestamp` (ISO 8601, UTC) and `monotonic_s` (seconds, for differences within one
process), `actor` where an actor speaks, and `exception` where one is logged.

One line per request at its end (`request.finished`), two per scheduler step at debug level only,
none per token.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from ...protocol.config import LogLevel

COMMON_FIELDS = frozenset({"actor", "request_id", "exc_info"})
"""What any event may carry besides its own fields."""


class Event(msgspec.Struct, frozen=True):
    """One kind of log line. `fields` says of each field what it is, unit included."""

    level: LogLevel
    meaning: str
    fields: Mapping[str, str]


_LABEL = "the id the client chose; labels may repeat"
_FRONTEND = "the first half of its requests' ids"
_PROCESS = "core host, or frontend host and its number"
_PREEMPTIONS = "times it gave its blocks up"

_STAGES: Mapping[str, str] = {
    "tokenise": "until its prompt was read",
    "queue": "behind others, or for a slot",
    "blocks": "first in line, for KV memory",
    "fetch": "for copies from the host",
    "prefill": "while its prompt, or all of it again, was computed",
    "decode": "while it generated",
    "preempted": "without its blocks, which others had",
    "paused": "for its reader",
    "restart": "for a new device, and its turn there",
    "detokenise": "until text was made of its last token",
    "send": "until its frontend took that",
    "stalled": "of prefill and decode, by which other requests' prefills made steps longer",
}

EVENTS: Mapping[str, Event] = {
    "engine.start": Event(
        "info",
        "the engine opens; the configuration that is in effect",
        {
            "config": "settings that differ from their defaults, secrets starred out",
            "device": "device and element type, in words",
            "threads": "compute threads, count",
            "block_size": "tokens in a KV block",
            "num_device_blocks": "KV blocks on the device, count",
            "num_host_blocks": "KV blocks on the host, count",
            "num_tokens": "tokens that the device's blocks hold, count",
            "max_model_len": "longest prompt + output, tokens",
        },
    ),
    "model.progress": Event("info", "something that takes seconds has begun", {"message": "what, in a sentence"}),
    "engine.ready": Event("info", "requests are served from here on", {"seconds": "from the start to here, s"}),
    "engine.warning": Event(
        "warning",
        "a setting that is allowed and usually a mistake",
        {
            "message": "what is wrong and with which numbers",
            "num_tokens": "tokens that the whole pool holds, count (pool smaller than one sequence)",
            "max_model_len": "tokens that one sequence may have, count (pool smaller than one sequence)",
            "num_host_blocks": "KV blocks on the host, count (too few to swap)",
        },
    ),
    "engine.stop": Event("info", "the engine has closed in order", {"seconds": "from ready to here, s"}),
    "engine.dead": Event("error", "the engine has stopped by itself; every waiting client gets an error", {"reason": "why"}),
    "request.finished": Event(
        "info",
        "the canonical line: one per request that opened, at its end, however it ended",
        {
            "request_id": "the engine's id, unique",
            "label": _LABEL,
            **{f"{stage}_s": f"{meaning}, s; left out where it is none" for stage, meaning in _STAGES.items()},
            "legs": "what held it, one after the other: stage, from and to in seconds since its arrival, stalled seconds of it",
            "stalled_by": "whose prefills these were: request, seconds; the most first",
            "e2e_s": "from arrival until its last text was handed over, s: the stages' sum",
            "ttft_s": "from arrival to its first token, s; none where there was no token",
            "num_prompt_tokens": "tokens of the prompt, count",
            "num_cached_tokens": "prompt tokens that the prefix cache held, count",
            "num_output_tokens": "tokens generated and delivered, count",
            "num_chunks": "steps that its prefill took, count",
            "num_sequences": "completions of the prompt (n); the other counts are over all of them, the prompt's once",
            "num_preemptions": _PREEMPTIONS + ", count",
            "finish_reason": "stop, length, abort or error",
        },
    ),
    "request.refused": Event(
        "info",
        "a request that never opened: wrong input, or too many waiting",
        {"request_id": "the engine's id", "label": _LABEL, "reason": "message to the caller", "field": "the field at fault"},
    ),
    "request.failed": Event(
        "error",
        "a request failed inside the engine, alone",
        {"request_id": "the engine's id", "label": _LABEL, "reason": "message to the caller"},
    ),
    "scheduler.step": Event(
        "debug",
        "one step as it was planned",
        {
            "step_id": "number of the step in its device epoch",
            "num_rows": "rows of the step, decodes and prefill chunks, count",
            "num_tokens": "tokens of all rows, count",
            "num_running": "running requests, count",
            "num_waiting": "waiting requests, count",
            "num_preempted": "preempted requests, count",
            "num_free_blocks": "device blocks that are free, count",
        },
    ),
    "scheduler.step_done": Event(
        "debug",
        "one step has ended",
        {
            "step_id": "number of the step in its device epoch",
            "predicted_s": "how long it was expected to take when it was sent, s; none before enough steps were seen",
            "step_s": "how long it took on the device, s",
        },
    ),
    "scheduler.preempted": Event(
        "info",
        "a running request gave its blocks up for another",
        {
            "request_id": "the one that gave way",
            "mode": "recompute or swap",
            "num_tokens": "tokens of its prompt and output so far, count",
            "num_freed_blocks": "device blocks that became free, count",
            "num_preemptions": _PREEMPTIONS + " so far, count",
            "swap_s": "what copying its blocks out and in is expected to cost everyone, s",
            "recompute_s": "what computing its tokens again is, s",
            "reason": "why this mode: configured, cheaper, short output, long output, host full, nothing to swap",
        },
    ),
    "scheduler.host_hit": Event(
        "info",
        "a request was admitted with part of its tokens on the host",
        {
            "request_id": "the one that came in",
            "fetched": "true: they are copied in; false: computing them again is cheaper",
            "num_tokens": "tokens on the host only, count",
            "fetch_s": "what copying them is expected to cost everyone, s",
            "recompute_s": "what computing them again is, s",
        },
    ),
    "scheduler.paused": Event(
        "info",
        "a request gave its blocks up because its reader is `credit_window` tokens behind",
        {"request_id": "the one that waits for its reader", "num_output_tokens": "tokens generated so far, count"},
    ),
    "trace.stopped": Event(
        "error",
        "the trace could not be written on; the engine goes on without it",
        {"path": "the file, as far as it was written", "reason": "what kept it"},
    ),
    "engine.stats": Event(
        "info",
        "every ten seconds while there is something to do: what has been done since the last one, and who is there",
        {
            "prompt_throughput": "prompt tokens computed (not those from the cache), tokens/s",
            "generation_throughput": "tokens generated, tokens/s",
            "num_running": "running requests, count",
            "num_waiting": "waiting requests, count",
            "num_preempted": "preempted requests, count",
            "num_paused": "requests whose readers are behind, count",
            "device_kv_usage": "device blocks that somebody holds, 0 to 1",
            "host_kv_usage": "host blocks that are not free, 0 to 1",
            "prefix_cache_hit_rate": "prompt tokens of those admitted that the cache held, 0 to 1; none: nobody was",
            "step_s": "a step of the device, on average, s; none: there was none",
            "num_steps": "steps, count",
            "inbox_depths": "unread messages by actor, of all processes together, count",
            "slowest": "the oldest requests: request_id, label, age_s (s), stage (what it does now)",
        },
    ),
    "tracing.failed": Event(
        "warning", "a request's trace could not be made, or not be sent; the request does not notice", {"reason": "why"}
    ),
    "metrics.failed": Event(
        "warning", "something could not be counted; requests do not notice", {"reason": "the last exception in words"}
    ),
    "device.lost": Event(
        "error",
        "the device is gone; every request goes on from its token log",
        {
            "epoch": "which life of the device",
            "reason": "how it was noticed",
            "restart_in_s": "until the next one is opened, s; none: the engine gives up",
        },
    ),
    "device.shared": Event(
        "info",
        "another process has come to use the device, or has gone; the speed of copies is measured again",
        {"epoch": "which life of the device", "reason": "who"},
    ),
    "device.ready": Event("info", "a new device has taken over", {"epoch": "which life of the device"}),
    "copy.failed": Event(
        "warning",
        "a copy between the device's KV pool and the host's failed; what it was to bring is computed again",
        {
            "epoch": "which life of the device",
            "copy_id": "number of the copy on its lane",
            "direction": "out (device to host) or in",
            "reason": "what went wrong",
        },
    ),
    "lane.stuck": Event(
        "warning",
        "a copy did not end when its device was closed; its thread is left behind",
        {"direction": "out (device to host) or in", "waited_s": "how long it was waited for, s"},
    ),
    "link.bad_message": Event(
        "warning",
        "a frame that is no message was dropped",
        {
            "reason": "what does not fit",
            "num_bytes": "bytes of the frame, count",
            "frontend": "the frontend that sent it, where it is known",
        },
    ),
    "frontend.joined": Event("info", "a frontend process is served from here on", {"frontend": _FRONTEND}),
    "frontend.left": Event("info", "a frontend process has taken its leave", {"frontend": _FRONTEND}),
    "frontend.lost": Event(
        "warning",
        "a frontend process is gone, silent, or does not read; its requests are aborted",
        {"frontend": _FRONTEND, "reason": "how it was noticed"},
    ),
    "core.connected": Event("info", "a frontend is served by a core", {"endpoint": "where"}),
    "core.lost": Event(
        "error",
        "the core is gone; open requests of this frontend end with an error, until there is another core",
        {"reason": "how it was noticed", "num_requests": "requests that end, count"},
    ),
    "process.ready": Event("info", "a process of the server serves", {"process": _PROCESS, "pid": "its process id"}),
    "process.ended": Event(
        "error",
        "a process of the server has ended without being told to",
        {
            "process": _PROCESS,
            "reason": "how it ended, or how it was noticed",
            "restart_in_s": "until it is started again, s; none: the server gives up",
        },
    ),
    "serve.ready": Event(
        "info",
        "all processes of the server serve",
        {
            "url": "where clients reach it",
            "endpoint": "where Python frontends reach its core",
            "frontends": "frontend processes, count",
            "seconds": "from the start to here, s",
        },
    ),
    "serve.drain": Event(
        "info", "a signal: what runs is finished, what is new is refused", {"deadline_s": "how long that may take, s"}
    ),
    "serve.stop": Event("info", "all processes of the server have ended", {"seconds": "from the start to here, s"}),
    "loop.lag": Event(
        "warning",
        "the event loop was blocked: tokens of all requests came late",
        {"lag_s": "how late the loop was, s", "hint": "what to do about it"},
    ),
    "http.disconnected": Event(
        "info",
        "a client closed its connection before its answer was complete; the work for it is aborted",
        {"label": _LABEL, "path": "what it had asked for"},
    ),
    "http.refused": Event(
        "info",
        "an answer that is an error: bad input, no key, no such path, too many waiting, no engine",
        {
            "label": _LABEL,
            "path": "what it had asked for",
            "status": "the HTTP status",
            "reason": "message to the caller",
            "field": "the field at fault",
        },
    ),
    "http.reader_stuck": Event(
        "warning",
        "a client took nothing of its answer for `max_pause_s`; its connection is broken off",
        {"label": _LABEL, "waited_s": "how long it was waited for, s"},
    ),
    "http.failed": Event(
        "error",
        "a mistake of ours while answering a request, which fails alone",
        {"label": _LABEL, "path": "what it had asked for", "reason": "the exception in words"},
    ),
    "actor.failed": Event(
        "error", "an exception escaped an actor; its supervisor decides", {"reason": "the exception in words"}
    ),
}
