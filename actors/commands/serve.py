"""`repertory serve`: an OpenAI-compatible server of several processes, any of which may die."""

from __future__ import annotations

import sys
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import anyio
from cyclopts import Group, Parameter

from ...protocol.config import EngineConfig, checked
from ...protocol.config_sources import load_config
from ...protocol.errors import ConfigError
from ..device import check_buildable, on_this_machine
from ..observing.logs import configure_logging
from .engine_flags import ConfigFile, engine_flags

if TYPE_CHECKING:
    from ..serving.server import Server

    EngineFlags = dict[str, Any]
else:
    EngineFlags = engine_flags()

_STOPPING = Group("Stopping", sort_key=1)
_DRAIN_HELP = "how long requests may take to finish after SIGTERM or Ctrl-C, in seconds"
_MODEL_HELP = "the model to serve, as --model"


def serve(
    model: Annotated[str | None, Parameter(help=_MODEL_HELP)] = None,
    /,
    *,
    drain_timeout_s: Annotated[float, Parameter(help=_DRAIN_HELP, group=_STOPPING)] = 30.0,
    config: ConfigFile = None,
    engine: Annotated[EngineFlags | None, Parameter(name="*")] = None,
) -> int:
    """Serve a model over HTTP, as OpenAI does.

    A core process schedules, a device process computes, and --frontends processes share the port. Any of them that dies
    is started again. SIGTERM or Ctrl-C finishes what runs, a second one ends at once.
    """
    flags = dict(engine or {})
    if model is not None:
        if "model" in flags:
            raise ConfigError("model: give it as an argument or as --model, not both", key="model")
        flags["model"] = model
    if not 0 <= drain_timeout_s < float("inf"):
        raise ConfigError(f"drain_timeout_s: {drain_timeout_s} is not a number of seconds", key="drain_timeout_s")
    settings = on_this_machine(checked(load_config(flags=flags, file=config)))
    check_buildable(settings)
    configure_logging(settings.log_format, settings.log_level)
    return anyio.run(partial(run, settings, drain_s=drain_timeout_s))


async def run(config: EngineConfig, *, drain_s: float, **commands: Any) -> int:
    """Serve until a signal. `commands` are the children's, where they are not the usual ones."""
    from ..serving.server import Server, listen_on, private_endpoint

    if config.worker != "process":
        raise ConfigError(f"worker: a server's device is a process of its own, not {config.worker!r}", key="worker")
    with listen_on(config.host, config.port) as listener, private_endpoint() as endpoint:
        return await Server(config, listener, endpoint, **commands).serve(drain_s=drain_s, announce=_announce)


def _announce(server: Server) -> None:
    sys.stdout.write(f"serving at {server.url} (Python: repertory.connect({server.endpoint!r}))\n")
    sys.stdout.flush()
