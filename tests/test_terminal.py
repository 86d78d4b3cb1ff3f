"""Progress bars, and commands whose output nobody can take: the work is done, and the exit status says so."""

import io
import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

import mha2mla
from mha2mla import terminal


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("interval", "count"), [(1e9, 0), (0.0, 502)])
def test_a_log_gets_a_line_per_interval(interval, count, monkeypatch):
    """Where the interval is 0, at the start, after every item and at the end."""
    log = io.StringIO()
    monkeypatch.setattr("sys.stderr", log)
    monkeypatch.setattr(terminal, "LINE_INTERVAL", interval)
    assert sum(terminal.progress_bar([1] * 500, show=True, desc="convert", unit="layer")) == 500
    lines = log.getvalue().splitlines()
    assert len(lines) == count and "\r" not in log.getvalue()
    assert all(line.startswith("convert: ") and " of 500 layers, " in line for line in lines)


def test_a_terminal_has_a_bar(monkeypatch):
    screen = Terminal()
    monkeypatch.setattr("sys.stderr", screen)
    monkeypatch.delenv("TQDM_DISABLE", raising=False)
    bar = terminal.progress_bar(total=2, show=True)
    bar.update(2)
    bar.close()
    assert "\r100%|" in screen.getvalue()


def test_nothing_is_shown_unless_asked_for(capsys):
    assert list(terminal.progress_bar([1, 2], show=False)) == [1, 2]
    assert capsys.readouterr().err == ""


# The module by itself: importing the package takes longer than all that is tested here.
PLACE = str(Path(mha2mla.__file__).parent)
COMMAND = """
import sys
from terminal import forgiving_streams
def main():
    with forgiving_streams() as output:
        print("π → " + "x" * {size})
        print("progress…", file=sys.stderr)
        open({file!r}, "w").write("done")
        return output.checked(0)
sys.exit(main())
"""


def run(tmp_path, redirection, size=1, **environment):
    """Exit status, what came out, and whether the work was done, under a redirection of the shell's."""
    file, script = tmp_path / "done", tmp_path / "script.py"
    script.write_text(COMMAND.format(size=size, file=str(file)))
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {sys.executable} {script} {redirection}"],
        env={**os.environ, "PYTHONPATH": PLACE, **environment},
        capture_output=True,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr, file.exists() and file.read_text() == "done"


@pytest.mark.parametrize(
    ("redirection", "size", "environment"),
    [
        ("", 1, {"PYTHONIOENCODING": "ascii"}),
        ("", 1, {"PYTHONIOENCODING": "latin-1"}),
        (">&-", 1, {}),
        ("2>&-", 1, {}),
        (">&- 2>&-", 1, {}),
        ("<&- >&- 2>&-", 1, {}),
        ("| true", 1 << 20, {}),
        ("2> /dev/full", 1, {}),
    ],
)
def test_lost_output_is_success(redirection, size, environment, tmp_path):
    status, output, done = run(tmp_path, redirection, size, **environment)
    assert status == 0 and done, output
    assert b"Traceback" not in output and b"Error" not in output
    if not redirection:
        assert b" ? x" in output or b"? ? x" in output


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
@pytest.mark.parametrize("size", [1, 1 << 20])
def test_answers_that_a_full_disk_lost_are_no_success(size, tmp_path):
    status, output, done = run(tmp_path, "> /dev/full", size)
    assert status == 2 and done
    assert output.decode().splitlines()[1:] == [
        "mha2mla: error: standard output cannot be written: No space left on device"
    ]


def test_closed_stream_does_not_become_a_file(tmp_path):
    """The lowest free number goes to the next file, and what libraries print would be written into it."""
    script = f"""
import os
from terminal import forgiving_streams
with forgiving_streams():
    with open({str(tmp_path / "weights")!r}, "wb") as file:
        os.write(2, b"a warning of a library")
        assert file.fileno() > 2
"""
    (tmp_path / "script.py").write_text(script)
    command = ["bash", "-c", f"{sys.executable} {tmp_path / 'script.py'} <&- >&- 2>&-"]
    environment = {**os.environ, "PYTHONPATH": PLACE}
    assert subprocess.run(command, env=environment, check=False).returncode == 0
    assert (tmp_path / "weights").read_bytes() == b""


@pytest.mark.slow
def test_convert_with_closed_streams(tiny_source, tmp_path):
    command = f"{sys.executable} -m mha2mla convert {tiny_source} {tmp_path / 'out'} --device cpu"
    command += (
        " --preset minimal --calibration.text builtin:prose --calibration.tokens 256 --calibration.lengths 64 >&- 2>&-"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(mha2mla.__file__).parents[1])}
    assert subprocess.run(["bash", "-c", command], env=environment, check=False).returncode == 0
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == "mha2mla"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_one_bar_spans_the_stages_of_a_job(monkeypatch):
    log = io.StringIO()
    monkeypatch.setattr("sys.stderr", log)
    monkeypatch.setattr(terminal, "LINE_INTERVAL", 0.0)
    with terminal.whole_bar("converting", show=True) as bar:
        first, skipped, last = terminal.split(bar, 1, 2, 1)
        assert [(span.start, span.stop) for span in (first, skipped, last)] == [(0, 25), (25, 75), (75, 100)]
        for _ in terminal.progress_bar([1, 2], show=first, desc="check", unit="tensor"):
            pass
        skipped.skip()  # no speed: the time left is that of the rest
        assert (bar.bar.n, bar.bar.initial) == (75, 50)
        with terminal.progress_bar(show=last, desc="verify", unit="layer", total=2, initial=1) as part:
            part.set_postfix({"loss": "0.1"})
            part.update()
    lines = log.getvalue().splitlines()
    assert "converting: 12 %" in log.getvalue() and "check, tensor 1 of 2" in log.getvalue()
    assert "converting: 100 %" in lines[-1] and lines[-1].endswith("verify, layer 2 of 2, loss 0.1")
    assert terminal.split(True, 1, 1) == [True, True]


def test_time_left_counts_down_until_it_is_unknown(monkeypatch):
    now = 0.0
    monkeypatch.setattr("tqdm.std.time", lambda: now)
    monkeypatch.setattr("sys.stderr", io.StringIO())
    with terminal.whole_bar("converting", show=True) as bar:
        first, _ = terminal.split(bar, 1, 3)
        for _ in terminal.progress_bar([1, 2], show=first, desc="check", unit="tensor"):
            now += 5.0
        for silence, left in (0.0, "00:30"), (29.0, "00:01"), (2.0, "?"):
            now += silence
            assert f", {left} left" in str(bar.bar)
    assert "00:00 left" in str(bar.bar)


def test_environment_disables_the_bar_of_a_job():
    """tqdm reads TQDM_DISABLE when it is imported."""
    script = """
import terminal
with terminal.whole_bar("converting", show=True) as bar:
    print(sum(terminal.progress_bar([1, 2], show=bar, desc="check", unit="tensor")))
"""
    environment = {**os.environ, "PYTHONPATH": PLACE, "TQDM_DISABLE": "1"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("3\n", "")


def test_a_bar_beats_where_a_stage_is_silent(monkeypatch):
    """A layer may take minutes; a log gets a line all the same."""
    log = io.StringIO()
    monkeypatch.setattr("sys.stderr", log)
    monkeypatch.setattr(terminal, "LINE_INTERVAL", 0.01)
    with terminal.whole_bar("converting", show=True):
        while "converting: 0 %" not in log.getvalue():
            pass
    with terminal.waiting("compiling", show=True):
        while "compiling: 00:00" not in log.getvalue():
            pass
    with terminal.whole_bar("converting", show=False) as bar, terminal.waiting("compiling", show=False):
        assert bar is False


def test_a_warning_is_one_line_without_its_place():
    own, usual = str(Path(terminal.__file__).with_name("model.py")), warnings.formatwarning
    with terminal.short_warnings():
        line = warnings.formatwarning("a sequence of 65 tokens", UserWarning, own, 465)
        other = warnings.formatwarning("old", DeprecationWarning, "/somewhere/else.py", 3)
    assert line == "mha2mla: warning: a sequence of 65 tokens\n"
    assert other == "/somewhere/else.py:3: DeprecationWarning: old\n"
    assert warnings.formatwarning is usual
