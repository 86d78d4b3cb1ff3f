"""Progress in a log: a line now and then."""

import io

import pytest

from mha2mla import progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("interval", "count"), [(1e9, 0), (0.0, 502)])
def test_a_log_gets_a_line_per_interval(interval, count, monkeypatch):
    """Where the interval is 0, at the start, after every item and at the end."""
    log = io.StringIO()
    monkeypatch.setattr("sys.stderr", log)
    monkeypatch.setattr(progress, "LINE_INTERVAL", interval)
    assert sum(progress.progress_bar([1] * 500, show=True, desc="convert", unit="layer")) == 500
    lines = log.getvalue().splitlines()
    assert len(lines) == count and "\r" not in log.getvalue()
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
