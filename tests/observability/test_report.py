"""The report: one file that asks for nothing, is what its policy says, and shows a long run coarser rather than not."""

import base64
import hashlib
import html.parser
import json
import re
import time
import tomllib
from fnmatch import fnmatch
from pathlib import Path

from repertory.actors.observing.report.build import build
from repertory.actors.observing.report.contents import contents
from repertory.actors.observing.runs.of_trace import read_run
from repertory.tests.observability.written import WrittenTrace, pressed

ROOT = Path(__file__).resolve().parents[2]
ATTACK = "</script><script>window.attacked = 1</script><img src=x onerror=attacked()><!-- {{program}}"


class Elements(html.parser.HTMLParser):
    """Every element with its attributes, and the texts of scripts and styles."""

    def __init__(self, page):
        super().__init__()
        self.found, self.texts, self._inside = [], [], None
        self.feed(page)
        self.close()
        self.texts = [(element, "".join(parts)) for element, parts in self.texts]

    def handle_starttag(self, tag, attributes):
        self.found.append((tag, dict(attributes)))
        if tag in ("script", "style"):
            self._inside = []
            self.texts.append([self.found[-1], self._inside])

    def handle_endtag(self, tag):
        self._inside = None

    def handle_data(self, data):
        if self._inside is not None:
            self._inside.append(data)


def run_of(written, name="here"):
    return read_run(written.lines(), name)


def embedded(page):
    found = [text for (tag, attributes), text in Elements(page).texts if attributes.get("id") == "run"]
    assert len(found) == 1
    return json.loads(found[0])


def test_the_page_asks_for_nothing():
    page = Elements(build(run_of(pressed())))
    for tag, attributes in page.found:
        for name in ("src", "href", "action", "data", "srcset"):
            assert attributes.get(name, "data:,") == "data:,", f"<{tag} {name}={attributes[name]}>"
    for _, text in page.texts:
        assert not re.search(r"https?://|@import|url\(|\bfetch\(|XMLHttpRequest|import\(|eval\(", text)


def test_the_policy_allows_this_program_and_this_style_and_nothing_else():
    page = Elements(build(run_of(pressed())))
    policy = next(attributes["content"] for tag, attributes in page.found if attributes.get("http-equiv"))
    digests = {
        tag: base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        for (tag, attributes), text in page.texts
        if attributes.get("type") != "application/json"
    }
    allowed = dict(part.strip().split(" ", 1) for part in policy.split(";"))
    assert allowed == {
        "default-src": "'none'",
        "img-src": "data:",
        "style-src": f"'sha256-{digests['style']}'",
        "script-src": f"'sha256-{digests['script']}'",
    }


def test_words_of_others_stay_words():
    written = (
        WrittenTrace()
        .arrived(1, 0.0, label=ATTACK)
        .travelled(2, 0.0, [("decode", 0.1, 0.05)], stalled_by=[(1, 0.05)], label=ATTACK)
    )
    harmless = WrittenTrace().arrived(1, 0.0).travelled(2, 0.0, [("decode", 0.1, 0.05)], stalled_by=[(1, 0.05)])
    page, other = build(run_of(written, name=ATTACK)), build(run_of(harmless))
    assert [tag for tag, _ in Elements(page).found] == [tag for tag, _ in Elements(other).found]
    assert embedded(page)["requests"][0]["name"].startswith(ATTACK)


def test_the_page_is_text_that_utf8_can_hold_whatever_the_label():
    page = build(run_of(WrittenTrace().arrived(1, 0.0, label="\u2028 é 漢 \x00 \U0001f600")))
    assert embedded(page.encode().decode())["requests"][0]["name"] == "\u2028 é 漢 \x00 \U0001f600"


def test_every_part_of_the_page_is_installed():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    patterns = project["tool"]["setuptools"]["package-data"]["repertory.actors.observing.report"]
    parts = [path.name for path in (ROOT / "actors/observing/report").iterdir() if path.suffix not in (".py", "")]
    assert {"page.html", "page.css", "page.js"} < set(parts)
    assert [name for name in parts if not any(fnmatch(name, pattern) for pattern in patterns)] == []


def test_ids_are_words_since_they_have_more_bits_than_a_number():
    assert embedded(build(run_of(pressed())))["requests"][0]["id"] == "4c8e288b-1"


def test_what_is_embedded_is_the_run():
    found = contents(run_of(pressed()))
    first = found["requests"][0]
    stages = [stage for stage, _, _ in found["stages"]]
    assert [(stages[leg[0]], leg[1], leg[2], leg[3]) for leg in first["legs"]][3] == ("decode", 0.07, 0.15, 0.035)
    assert first["blamed"] == [["job-3", 0.03, 2], ["job-2", 0.015, 1]]
    assert found["steps"]["host"] == [0, 0, 10, 15]
    assert found["copies"]["in"]["ok"] == [0]
    assert [words for _, words in found["incidents"]] == ["the device was lost", "a new device was ready"]


def test_the_guilty_are_named_though_they_are_not_in_the_list():
    written = WrittenTrace().travelled(1, 0.0, [("decode", 0.1, 0.05)], stalled_by=[(9, 0.05)])
    assert contents(run_of(written))["requests"][0]["blamed"] == [["4c8e288b-9", 0.05, -1]]


def test_more_than_can_be_looked_at_is_drawn_coarser_and_said():
    written = WrittenTrace()
    for number in range(1, 31):
        written.step(number * 0.1, 0.05, load=(number, 1, 1))
        written.travelled(number, number * 0.1, [("queue", 0.01 * number)])
    found = contents(run_of(written), most_steps=10, most_requests=5)
    assert found["steps"]["count"] == [3] * 10
    assert sum(found["steps"]["prefill"]) == sum(range(1, 31))
    assert found["steps"]["busy"][0] == 0.15
    assert [request["name"] for request in found["requests"]] == [f"job-{number}" for number in range(26, 31)]
    assert "The 5 slowest of 30 requests are listed." in found["notes"]
    assert "Each 3 neighbouring steps are drawn as one." in found["notes"]
    assert (found["num_steps"], found["num_requests"]) == (30, 30)


def test_a_long_run_is_built_in_seconds():
    written = WrittenTrace()
    for number in range(1, 3001):
        written.travelled(number, number * 0.1, [("queue", 0.1), ("decode", 2.0, 0.1)], stalled_by=[(1, 0.1)])
    for number in range(10_000):
        written.step(number * 0.03, 0.02, decodes=[1], load=(0, 1, 1))
    run = run_of(written)
    start = time.perf_counter()
    build(run)
    assert time.perf_counter() - start < 10.0  # a tenth of that alone; what grows with the square takes minutes
