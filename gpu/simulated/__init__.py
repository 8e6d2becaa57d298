"""An executor without a device: no torch, but memory that remembers who wrote what."""
