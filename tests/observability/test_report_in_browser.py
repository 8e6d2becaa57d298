"""The report in a real browser: opened, clicked, read, and looked at, with a mouse and with keys alone."""

import re
import struct
import time

import pytest

from repertory.actors.observing.report.build import build
from repertory.actors.observing.runs.of_logs import read_run as read_logs
from repertory.actors.observing.runs.of_trace import read_run
from repertory.tests.observability.test_report import ATTACK
from repertory.tests.observability.test_runs import FINISHED, LEGS
from repertory.tests.observability.written import WrittenTrace, pressed

pytestmark = pytest.mark.alone

COLOURS = """(() => {
  const canvas = document.querySelector('canvas');
  const data = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;
  const seen = new Set();
  for (let i = 0; i < data.length; i += 4) seen.add(data[i] << 16 | data[i + 1] << 8 | data[i + 2]);
  return seen.size;
})()"""
"""How many there are on the canvas."""
PLACES = """[...document.querySelectorAll('.track i')].map(bar => {
  const [inner, outer] = [bar, bar.parentElement].map(one => one.getBoundingClientRect());
  return [bar.className, (inner.left - outer.left) / outer.width, inner.width / outer.width];
})"""
"""Of each bar: its kind, where it begins and how long it is, as shares of its line."""
FOCUS = "document.activeElement.textContent"


@pytest.fixture
def opened(browser, tmp_path):
    """Opens the report of a run."""

    def open_report(run):
        path = tmp_path / "report.html"
        path.write_text(build(run), encoding="utf-8")
        browser.goto(path)
        browser.wait_until("document.querySelectorAll('#rows tr').length > 0")
        return browser

    return open_report


def test_a_click_on_a_request_shows_its_way(opened, tmp_path):
    browser = opened(read_run(pressed().lines(), "here"))
    assert "Choose a request" in browser.text("#way")
    browser.click("#rows tr:nth-child(2) .pick")
    way = " ".join(browser.text("#way").split())
    assert way.startswith("job-1: 390 ms, first token after 70.0 ms, ended by length")
    assert "decode Worker 70.0 ms 80.0 ms 21% stalled 35.0 ms 9.0% preempted Scheduler 150 ms 40.0 ms 10%" in way
    assert "stalled 45.0 ms by the prefills of job-3 (30.0 ms), job-2 (15.0 ms)" in way
    assert "preempted by swap (cheaper): 5 blocks freed" in way
    browser.click("#way .who")  # the first of those to blame
    assert browser.text("#way .headline") == "job-3: 290 ms, ended by error"
    assert browser.run("document.querySelector('tr[aria-selected=true] .pick').textContent") == "job-3"
    picture = browser.screenshot(tmp_path / "report.png")
    assert picture.startswith(b"\x89PNG") and struct.unpack(">II", picture[16:24]) == (1280, 900)
    assert browser.run(COLOURS) > 8
    assert browser.complaints == []
    assert browser.requested == [(tmp_path / "report.html").as_uri()]


def test_bars_of_legs_stand_where_their_legs_do(opened):
    browser = opened(read_run(WrittenTrace().travelled(1, 0.0, [("queue", 0.25), ("decode", 0.75, 0.25)]).lines(), "here"))
    browser.click("#rows .pick")
    boxes = browser.run(PLACES)
    assert [name for name, _, _ in boxes] == ["is-queue", "is-decode", "is-stalled"]
    assert [place for _, *places in boxes for place in places] == pytest.approx([0, 0.25, 0.25, 0.75, 0.75, 0.25], abs=0.01)


def test_words_of_others_are_shown_and_not_obeyed(opened):
    written = WrittenTrace().travelled(1, 0.0, [("decode", 0.1, 0.05)], stalled_by=[(2, 0.05)], label=ATTACK)
    written.travelled(2, 0.0, [("queue", 0.2)], label=ATTACK + "2")
    browser = opened(read_run(written.lines(), ATTACK))
    browser.click("#rows tr:nth-child(2) .pick")
    assert ATTACK in browser.text("#way") and ATTACK in browser.text("#name")
    assert browser.run("typeof window.attacked") == "undefined"
    assert browser.run("document.querySelectorAll('img').length") == 0
    assert browser.complaints == []


def test_keys_alone_reach_everything(opened):
    browser = opened(read_run(pressed().lines(), "here"))
    browser.run("document.querySelector('#rows .pick').focus()")
    browser.press("Enter")
    assert browser.text("#way .headline").startswith("job-2")
    browser.press("ArrowDown")
    assert browser.text("#way .headline").startswith("job-1")
    assert browser.run(FOCUS) == "job-1"
    browser.run("document.querySelector('canvas').focus()")
    browser.press("+")
    browser.wait_until("!document.querySelector('canvas').getAttribute('aria-label').includes('from 0 to')")
    assert "running" in browser.text("#readout")
    browser.press("0")
    browser.wait_until("document.querySelector('canvas').getAttribute('aria-label').includes('from 0 to 500 ms')")
    browser.press("r")
    browser.wait_until("document.querySelector('canvas').getAttribute('aria-label').includes('to 452 ms')")
    assert browser.complaints == []


def test_the_timeline_zooms_around_the_mouse_and_leaves_the_wheel_to_the_page(opened):
    browser = opened(read_run(pressed().lines(), "here"))
    label = "document.querySelector('canvas').getAttribute('aria-label')"
    x, y = browser.run(
        "(() => { const b = document.querySelector('canvas').getBoundingClientRect(); return [b.right - 2, b.top + 60]; })()"
    )
    browser.wheel(x, y, 100)
    browser.wait_until("true")
    assert "from 0 to 500 ms" in browser.run(label)
    browser.run("scrollTo(0, 0)")
    browser.wheel(x, y, -100, ctrl=True)
    browser.wait_until(f"!{label}.includes('from 0 to')")
    start, end = re.search(r"from (\d+) ms to (\d+) ms", browser.run(label)).groups()
    assert int(start) > 100 and int(end) >= 495  # what was under the mouse has stayed there


def test_the_list_is_sorted_and_searched(opened):
    browser = opened(read_run(pressed().lines(), "here"))
    names = "[...document.querySelectorAll('#rows .pick')].map(one => one.textContent)"
    assert browser.run(names) == ["job-2", "job-1", "job-3", "job-4", "job-5"]
    browser.click("#columns th:nth-child(1) button")
    assert browser.run(names) == ["job-1", "job-2", "job-3", "job-4", "job-5"]
    assert browser.run("document.querySelector('th[aria-sort]').getAttribute('aria-sort')") == "ascending"
    browser.run("document.querySelector('#filter').focus()")
    for letter in "abort":
        browser.press(letter)
    assert browser.run(names) == ["job-4"]
    browser.press("x")
    assert "no request has these words" in browser.text("#rows")
    assert browser.complaints == []


def test_the_chosen_request_is_in_the_address(opened, tmp_path):
    browser = opened(read_run(pressed().lines(), "here"))
    browser.run("location.hash = '#4c8e288b-3'")
    browser.wait_until("document.querySelector('#way .headline')?.textContent.startsWith('job-3')")
    browser.run("location.hash = '#%'")
    browser.wait_until("true")
    assert browser.complaints == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [420, 1280])
def test_it_fits_the_window_and_can_be_read(opened, scheme, width):
    browser = opened(read_run(pressed().lines(), "here"))
    browser.resize(width, 900)
    browser.prefer(scheme)
    browser.click("#rows .pick")
    browser.wait_until("true")
    assert browser.run("document.documentElement.scrollWidth <= innerWidth")
    ink, page = browser.run(
        "['ink', 'panel'].map(n => getComputedStyle(document.documentElement).getPropertyValue(`--${n}`).trim())"
    )
    light = [sum(int(colour[i : i + 2], 16) for i in (1, 3, 5)) for colour in (ink, page)]
    assert abs(light[0] - light[1]) > 450
    assert (light[1] > light[0]) == (scheme == "light")
    assert browser.run(COLOURS) > 8


def test_logs_and_an_empty_run_have_a_page_too(opened):
    browser = opened(read_logs([FINISHED + LEGS + b"}\n"], "logs"))
    browser.click("#rows .pick")
    assert "stalled 200 ms by the prefills of 4c8e288b-2 (150 ms), 4c8e288b-3 (50.0 ms)" in browser.text("#way")
    assert "Logs have no times of steps" in browser.run("document.querySelector('#notes').textContent")
    opened(read_run(WrittenTrace().finished(0.0).lines(), "empty"))
    assert "there are no requests in this run" in browser.text("#rows")
    assert browser.complaints == []


@pytest.mark.slow
def test_a_long_run_stays_usable(opened):
    written = WrittenTrace()
    for number in range(1, 100_001):
        written.step(number * 0.012, 0.01, decodes=[1, 2], load=(256 * (number % 3), 1, 2))
    for number in range(1, 10_001):
        legs = [("queue", 0.1), ("prefill", 0.2, 0.1), ("decode", number % 97 + 1, 0.5), ("preempted", 0.1), ("decode", 1.0)]
        written.travelled(number, number * 0.11, legs, stalled_by=[(max(1, number - 1), 0.5)])
    browser = opened(read_run(written.lines(), "here"))
    label = "document.querySelector('canvas').getAttribute('aria-label')"
    for act in (
        lambda: browser.click("#rows tr:nth-child(9) .pick"),
        lambda: browser.click("#zoom-request"),
        lambda: browser.click("#columns th:nth-child(1) button"),
        lambda: browser.click("#zoom-all"),
    ):
        start = time.perf_counter()
        act()
        browser.wait_until(f"{label} !== ''")
        assert time.perf_counter() - start < 3.0  # 0.2 s alone
    assert "from 0 to 20." in browser.run(label)
    assert browser.complaints == []
