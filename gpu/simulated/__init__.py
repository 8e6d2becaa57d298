"""An executor without a device: no torch, but memory that remembers who wrote what."""

from .executor import SimulatedExecutor, open_simulated
from .fences import FenceViolation
from .memory import MemoryFault, SimulatedMemory

__all__ = ["FenceViolation", "MemoryFault", "SimulatedExecutor", "SimulatedMemory", "open_simulated"]
