"""Progress on a terminal, in a pipe and in a library call."""

import io
import sys
import time
from types import SimpleNamespace

import pytest

from dflash_jax import progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def err(monkeypatch, request):
    stream = request.param()
    # pytest sets sys.stderr anew before the test.
    monkeypatch.setattr(progress, "sys", SimpleNamespace(stderr=stream))
    monkeypatch.setattr(progress, "TICK_S", 0.01)
    monkeypatch.delenv("DFLASH_PROGRESS", raising=False)
    yield stream
    progress.disable()


def run(delay: float = 0.0) -> None:
    """A bar of three units, and a step."""
    for _ in progress.bar(range(3), description="counting", unit="unit", delay=delay, mininterval=0):
        time.sleep(0.01)
    with progress.step("compiling", expected_s=9.0, line="compiling programs"):
        time.sleep(0.05)


@pytest.mark.parametrize("err", [Terminal], indirect=True)
def test_a_command_shows_bars_on_a_terminal_and_removes_them(err, monkeypatch):
    monkeypatch.setattr(progress, "DELAY_S", 0.0)
    progress.enable()
    run()
    for part in ("counting: ", "3/3", "compiling (0 s of about 9 s)"):
        assert part in err.getvalue()
    assert err.getvalue().endswith("\r")
    assert "\n" not in err.getvalue()


@pytest.mark.parametrize("err", [io.StringIO], indirect=True)
def test_a_command_writes_one_line_each_in_a_pipe(err, monkeypatch):
    monkeypatch.setattr(progress, "DELAY_S", 0.0)
    progress.enable()
    run()
    run()
    assert err.getvalue() == "counting\ncompiling programs\n"


@pytest.mark.parametrize("err", [Terminal, io.StringIO], indirect=True)
def test_lines_are_written_above_a_bar_and_without_one(err):
    """A batch writes its errors so."""
    progress.enable()
    with progress.bar(description="answering", total=1, unit="request", delay=0) as bar:
        bar.set_postfix_str("3 tok/s", refresh=False)
        bar.write("line 3: invalid", file=err)
        bar.update()
    assert "line 3: invalid\n" in err.getvalue()


@pytest.mark.parametrize("err", [Terminal, io.StringIO], indirect=True)
def test_short_steps_show_nothing(err):
    progress.enable()
    run(delay=60)
    assert err.getvalue() == ""


@pytest.mark.parametrize("err", [Terminal, io.StringIO], indirect=True)
def test_a_library_call_shows_loading_alone_and_on_a_terminal_alone(err):
    run()
    assert err.getvalue() == ""
    list(progress.bar(range(3), description="loading", delay=0, in_library=True))
    assert ("loading" in err.getvalue()) == err.isatty()


@pytest.mark.parametrize("err", [Terminal, io.StringIO], indirect=True)
def test_nothing_is_shown_over_text(err):
    progress.enable()
    progress.hide()
    run()
    assert err.getvalue() == ""


@pytest.mark.parametrize("err", [Terminal, io.StringIO], indirect=True)
def test_progress_is_shown_again_when_the_text_has_ended(err, monkeypatch):
    monkeypatch.setattr(progress, "DELAY_S", 0.0)
    progress.enable()
    progress.hide()
    progress.show()
    run()
    assert "compiling" in err.getvalue()


def test_a_terminal_without_columns_and_a_closed_stderr(monkeypatch):
    monkeypatch.setattr(progress.os, "get_terminal_size", lambda _: progress.os.terminal_size((0, 0)))
    monkeypatch.setattr(sys, "stderr", sys.__stderr__)
    assert progress._columns() == 80
    monkeypatch.setattr(sys, "stderr", None)
    assert not progress.is_terminal()
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr(sys, "stderr", closed)
    assert not progress.is_terminal()


@pytest.mark.parametrize("err", [Terminal, io.StringIO], indirect=True)
def test_the_start_of_a_command_shows_at_once_on_a_terminal_alone(err):
    progress.enable()
    with progress.starting():
        shown = err.getvalue()
    assert ("starting" in shown) == err.isatty()
    assert err.isatty() or not err.getvalue()
