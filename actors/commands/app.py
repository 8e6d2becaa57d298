"""The verbs of the command line. One file each, imported when its verb is used.

To add a verb: a file beside this one with a function, and a line in `VERBS`. The function's
parameters are the flags, its docstring the help; it returns the exit status, or None for 0.
"""

from __future__ import annotations

from importlib import metadata

from cyclopts import App

VERBS = {
    "generate": ("generate:generate", "Generate text for one prompt or many."),
    "chat": ("chat:chat", "Talk to a model in the terminal."),
    "serve": ("serve:serve", "Serve a model over HTTP, to any number of clients."),
    "simulate": ("simulate:simulate", "Replay a recorded run, or try another policy on it, without a device."),
    "trace": ("trace:trace", "Why was this request slow? Every request's way through a run, from its trace or logs."),
    "top": ("top:top", "Watch a server in the terminal."),
    "bench": ("bench:bench", "Measure this engine, or any OpenAI-compatible server."),
}
"""Verb -> (module in this folder:function, the line in `repertory --help`)."""


def build_app() -> App:
    """The command line, with no verb imported yet."""
    app = App(
        name="repertory", help="An LLM inference engine: continuous batching over a prefix-sharing cache.", version=_version
    )
    for verb, (function, line) in VERBS.items():
        app.command(f"{__package__}.{function}", name=verb, help=line)
    return app


def _version() -> str:
    return metadata.version("repertory")
