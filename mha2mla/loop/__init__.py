"""A research loop over ``PagedCache``: many requests at once through one model, source or converted, and one reader.

``request.py`` is what is asked for, ``scheduler.py`` who runs in a step and on which pages, ``runner.py`` the step on
the device, ``sampler.py`` the next tokens, ``loop.py`` all of them in turn. docs/loop.md reads them in that order.
"""

from mha2mla.loop.loop import Loop, Progress
from mha2mla.loop.request import Request, Sampling
from mha2mla.loop.runner import Runner
from mha2mla.loop.scheduler import Chunk, Scheduler

__all__ = ["Chunk", "Loop", "Progress", "Request", "Runner", "Sampling", "Scheduler"]
