"""Everything that touches a device: models, KV pools, attention, sampling, copies. No event loop."""
