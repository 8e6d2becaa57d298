"""The actors, the pure cores beside them, and the frontends."""
