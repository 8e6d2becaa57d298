"""An executor without a device: no torch, but memory that remembers who wrote what."""

from .executor import SimulatedExecutor, open_simulated
from .memory import MemoryFault, SimulatedMemory

__all__ = ["MemoryFault", "SimulatedExecutor", "SimulatedMemory", "open_simulated"]
