"""Progress in a log: a line now and then."""

import io
import time

import pytest

from mha2mla import progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("interval", "fewest", "most"), [(30.0, 0, 0), (0.1, 2, 8)])
def test_a_log_got_a_bar_for_every_tenth_of_a_second(interval, fewest, most, monkeypatch):
    """Hundreds, one behind another on a line that never ended."""
    log = io.StringIO()
    monkeypatch.setattr("sys.stderr", log)
    monkeypatch.setattr(progress, "LINE_INTERVAL", interval)
    for _ in progress.progress_bar(range(500), show=True, desc="convert", unit="layer"):
        time.sleep(0.001)
    lines = log.getvalue().splitlines()
    assert fewest <= len(lines) <= most and "\r" not in log.getvalue()
    assert all(line.startswith("convert: ") and " of 500 layers, " in line for line in lines)


def test_a_terminal_has_a_bar(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.delenv("TQDM_DISABLE", raising=False)
    bar = progress.progress_bar(total=2, show=True)
    bar.update(2)
    bar.close()
    assert "\r100%|" in terminal.getvalue()


def test_nothing_is_shown_unless_asked_for(capsys):
    assert list(progress.progress_bar([1, 2], show=False)) == [1, 2]
    assert capsys.readouterr().err == ""
