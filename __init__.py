"""repertory: an LLM inference engine made of independent asyncio actors."""
