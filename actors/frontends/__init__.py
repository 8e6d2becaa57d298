"""How callers reach the engine: embedded async, blocking."""
