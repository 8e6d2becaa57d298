"""The frontend's own actor: new text goes to the request it belongs to."""

from __future__ import annotations

from ...protocol.errors import RepertoryError
from ...protocol.ids import RequestId
from ...protocol.messages import TextOut, Tokenized
from ..mailbox import Mailbox
from .stream import Delivery


class Dispatcher:
    """Receives `TextOut` and `Tokenized`. Its table holds a request from `Submit` to terminal."""

    def __init__(self, inbox: Mailbox[TextOut | Tokenized]) -> None:
        self.inbox = inbox
        self._deliveries: dict[RequestId, Delivery] = {}
        self._labels: dict[str, list[RequestId]] = {}

    def __len__(self) -> int:
        return len(self._deliveries)

    def add(self, delivery: Delivery) -> None:
        """A request was submitted."""
        self._deliveries[delivery.request_id] = delivery
        self._labels.setdefault(delivery.label, []).append(delivery.request_id)

    def labelled(self, label: str) -> list[RequestId]:
        """Live requests with this label, which may be several, or none."""
        return list(self._labels.get(label, ()))

    async def run(self) -> None:
        """Serve until cancelled."""
        while True:
            for message in await self.inbox.take():
                if isinstance(message, TextOut):
                    self.on_text_out(message)
                elif (delivery := self._deliveries.get(message.request_id)) is not None:
                    delivery.on_tokenized(message)

    def on_text_out(self, message: TextOut) -> None:
        """Hand each delta to its request; forget those that ended."""
        for delta in message.deltas:
            delivery = self._deliveries.get(delta.request_id)
            if delivery is None:
                continue
            delivery.on_delta(delta)
            if delta.finish_reason is not None and delta.is_terminal:
                self._forget(delivery)

    def fail_all(self, error: RepertoryError) -> None:
        """The engine has stopped: nobody waits for ever."""
        for delivery in list(self._deliveries.values()):
            delivery.fail(error)
            self._forget(delivery)

    def _forget(self, delivery: Delivery) -> None:
        del self._deliveries[delivery.request_id]
        same = self._labels[delivery.label]
        same.remove(delivery.request_id)
        if not same:
            del self._labels[delivery.label]
