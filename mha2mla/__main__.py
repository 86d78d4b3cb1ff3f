"""The command ``mha2mla``, or ``python -m mha2mla``: Ctrl-C ends it at any moment with one line and exit code 130.

Nothing that takes time is imported before the signal has its handler.
"""

import os
import signal
import sys
from types import FrameType

INTERRUPTED = 130  # 128 + SIGINT, as shells have it


def main() -> int:
    """Runs ``mha2mla.cli.main`` as this process's only job, and returns its exit code."""
    interrupts: list[int] = []

    def interrupt(number: int, frame: FrameType | None) -> None:
        interrupts.append(number)
        raise KeyboardInterrupt

    def unraisable(found: "sys.UnraisableHookArgs") -> None:
        if isinstance(found.exc_value, KeyboardInterrupt):
            # It came while a destructor or a callback ran, where Python drops it: once more, when that is over.
            signal.setitimer(signal.ITIMER_REAL, 0.01)
        else:
            sys.__unraisablehook__(found)

    if sys.stderr is None or not sys.stderr.isatty():
        # A log gets our bars as a line now and then (mha2mla.progress); those of transformers would be hundreds.
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    signal.signal(signal.SIGINT, interrupt)
    signal.signal(signal.SIGALRM, interrupt)
    sys.unraisablehook = unraisable
    try:
        from mha2mla.cli import main as run

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
        signal.signal(signal.SIGINT, lambda *_: os._exit(INTERRUPTED))  # all that is left to stop is the interpreter


if __name__ == "__main__":
    sys.exit(main())
