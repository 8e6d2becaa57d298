"""What an actor's mailbox says about it."""

from __future__ import annotations

from typing import Any, cast

from ...protocol.metrics import ActorLoad, ActorName
from ..mailbox import Mailbox


def load_of(mailbox: Mailbox[Any], process: str = "") -> ActorLoad:
    """Of the actor that reads it, and lives in `process`."""
    load = mailbox.load
    return ActorLoad(
        cast(ActorName, mailbox.name),
        len(mailbox) + mailbox.num_senders,
        load.num_messages,
        load.num_turns,
        load.handler_s,
        load.num_restarts,
        process,
    )
