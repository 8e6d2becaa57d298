"""Puts the page together: markup, style and program from the files beside this one, and the run as JSON.

Nothing in the file comes from elsewhere, and its policy (`Content-Security-Policy`) allows nothing but these very
texts, by their digests. Labels are anybody's words: the JSON has no `<` in it, so it cannot end the element that holds it
or begin another, and the program writes words as text, never as markup.
"""

from __future__ import annotations

import base64
import hashlib
import html
import re
from importlib import resources

import msgspec

from ..runs.run import Run
from .contents import contents

_PROGRAM = ("figures.js", "timeline.js", "waterfall.js", "requests.js", "page.js")
"""In the order in which they are read."""
_ESCAPES = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}


def build(run: Run) -> str:
    """The page that shows `run`."""
    style = _part("page.css")
    program = '(() => {\n"use strict";\n' + "\n".join(_part(name) for name in _PROGRAM) + "\n})();\n"
    parts = {
        "title": html.escape(f"{run.name}: a run of repertory"),
        "policy": f"default-src 'none'; img-src data:; style-src {_digest(style)}; script-src {_digest(program)}",
        "style": style,
        "run": _as_json(contents(run)),
        "program": program,
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], _part("page.html"))


def _part(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _as_json(value: object) -> str:
    encoded = msgspec.json.encode(value).decode()
    return re.sub("[<>&\u2028\u2029]", lambda found: _ESCAPES[found[0]], encoded)
