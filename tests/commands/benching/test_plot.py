"""`--plot`: refused early where it cannot work, and a picture where it can."""

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from repertory.actors.commands.benching import plot
from repertory.actors.commands.benching.show import Figure
from repertory.protocol.errors import ConfigError, ValidationError

PNG = b"\x89PNG\r\n\x1a\n"


def test_no_plot_needs_nothing(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    plot.check_can_plot(None)


def test_a_missing_matplotlib_names_the_extra(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"pip install 'repertory\[plot\]'"):
        plot.check_can_plot(tmp_path / "x.png")


@pytest.mark.parametrize("name", ["x.svg", "x", "none/x.png", "folder.png"])
def test_a_path_that_cannot_become_a_picture_is_refused(tmp_path, name):
    (tmp_path / "folder.png").mkdir()
    with pytest.raises(ValidationError, match="--plot"):
        plot.check_can_plot(tmp_path / name)


def test_figures_become_bars_with_all_repetitions():
    (panel,) = plot.figure_panels([Figure("key", "TTFT", "ms", [3.0, 1.0, 2.0])])
    assert panel == plot.Panel("TTFT", "ms", {"TTFT": [3.0, 1.0, 2.0]}, as_bars=True)


@pytest.mark.skipif(find_spec("matplotlib") is None, reason="matplotlib is not installed")
@pytest.mark.parametrize("values", [[1.0, 2.0, 900.0], [1.0], [], [0.0, 0.0], [float("nan")]])
@pytest.mark.parametrize("as_bars", [True, False])
def test_a_picture_is_written_whatever_the_values(tmp_path: Path, values, as_bars):
    path = tmp_path / "x.png"
    plot.check_can_plot(path)
    plot.draw(path, "a title", [plot.Panel("one", "ms", {"a": values, "b": [5.0]}, as_bars)] * 2)
    assert path.read_bytes().startswith(PNG)
