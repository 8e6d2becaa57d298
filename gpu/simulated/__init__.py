"""An executor without a device: no torch, but memory that remembers who wrote what."""

from .executor import SimulatedExecutor
from .fences import FenceViolation
from .memory import MemoryFault, SimulatedMemory
from .opening import open_simulated

__all__ = ["FenceViolation", "MemoryFault", "SimulatedExecutor", "SimulatedMemory", "open_simulated"]
