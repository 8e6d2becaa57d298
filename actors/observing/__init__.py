"""How the engine is seen: structured logs."""
