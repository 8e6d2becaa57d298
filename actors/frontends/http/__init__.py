"""The engine over HTTP, as OpenAI's clients speak it. `app.py` is the way in."""
