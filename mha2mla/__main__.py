"""The command ``mha2mla``, or ``python -m mha2mla``: Ctrl-C ends it at any moment with one line and exit code 130.

Nothing that takes time is imported before the signal has its handler.
"""

import os
import signal
import sys
from types import FrameType

INTERRUPTED = 130  # 128 + SIGINT, as shells have it
AGAIN = 0.5  # seconds until an interrupt is repeated that was lost


def main() -> int:
    """Runs ``mha2mla.cli.verbs.main`` as this process's only job, and returns its exit code.

    An interrupt that neither ends something nor is on its way to (a library caught it, or it came in a destructor,
    where Python drops it) is repeated. A verb that means to go on after one sets a handler of its own.
    """
    interrupts: list[int] = []

    def interrupt(number: int, frame: FrameType | None) -> None:
        interrupts.append(number)
        signal.setitimer(signal.ITIMER_REAL, AGAIN, AGAIN)
        raise KeyboardInterrupt

    def repeat(number: int, frame: FrameType | None) -> None:
        if not _is_interrupt(sys.exc_info()[1]):  # else a handler is cleaning up
            raise KeyboardInterrupt

    def unraisable(found: "sys.UnraisableHookArgs") -> None:
        if not _is_interrupt(found.exc_value):
            sys.__unraisablehook__(found)

    if sys.stderr is None or not sys.stderr.isatty():
        # A log gets our bars as a line now and then (mha2mla.terminal); others', as of lm-eval, would be hundreds.
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        os.environ.setdefault("TQDM_MININTERVAL", "30")  # seconds
    # Idle threads sleep: spinning ones took 72 CPU seconds for a tiny conversion beside other work, sleeping ones 11.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    signal.signal(signal.SIGALRM, repeat)
    signal.signal(signal.SIGINT, interrupt)
    sys.unraisablehook = unraisable
    try:
        from mha2mla.cli.verbs import main as run

        status = run()
        return INTERRUPTED if status and interrupts else status
    except BaseException:  # whatever a library made of it: an import that was cut short, an error of a callback
        if not interrupts:
            raise
        print("mha2mla: interrupted", file=sys.stderr)
        # An interrupt that passed through code that a library made by exec() stays noted by the interpreter, which at
        # its end kills itself by it; the next exec() takes that back.
        exec("")
        return INTERRUPTED
    finally:
        signal.signal(signal.SIGALRM, signal.SIG_IGN)
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGINT, lambda *_: os._exit(INTERRUPTED))  # all that is left to stop is the interpreter


def _is_interrupt(error: BaseException | None) -> bool:
    """A KeyboardInterrupt, or an error raised because of one."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__context__
    return error is not None


if __name__ == "__main__":
    sys.exit(main())
