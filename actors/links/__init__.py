"""The link between frontend processes and the core: ZeroMQ over a socket in a private folder, one codec, both ends."""
