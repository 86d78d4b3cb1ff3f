"""How a process that converts on a CPU holds its memory."""

from __future__ import annotations

import ctypes

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # of glibc's malloc.h
_LARGEST_INT = 2**31 - 1


def keep_freed_memory() -> None:
    """Has glibc keep what is freed for what is allocated next. Where there is another C library, nothing happens.

    Activations of a layer come and go with every batch. By itself glibc maps each from 32 MiB on anew, and the clearing
    of their pages by the system was a fifth of a conversion's CPU time. Of the whole process, so only for one whose
    work this is: what it once took stays its own until it ends.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return
    mallopt(_M_MMAP_MAX, 0)
    mallopt(_M_TRIM_THRESHOLD, _LARGEST_INT)
