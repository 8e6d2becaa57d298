"""Which kind of device serves a configuration: what the keeper calls for each new life."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ...protocol.config import EngineConfig
from ...protocol.ids import Epoch
from ..device import DeviceOpener, open_executor
from .device import Device, MakeDevice, OnAnswer
from .inline import InlineDevice
from .process import HOST_COMMAND, ProcessDevice


def device_maker(
    config: EngineConfig,
    model_dir: Path,
    *,
    open_device: DeviceOpener | None = None,
    host_command: Sequence[str] = HOST_COMMAND,
) -> MakeDevice:
    """A function that makes one device per epoch, where `config.worker` says. `open_device` always runs inline."""

    def in_a_thread(epoch: Epoch, on_answer: OnAnswer) -> Device:
        opener = open_device or open_executor
        return InlineDevice(epoch, lambda: opener(config, model_dir), on_answer)

    def in_a_process(epoch: Epoch, on_answer: OnAnswer) -> Device:
        return ProcessDevice(epoch, config, model_dir, on_answer=on_answer, command=host_command)

    return in_a_thread if open_device is not None or config.worker == "inline" else in_a_process
