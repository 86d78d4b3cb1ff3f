"""A research loop over ``PagedCache``: many requests at once through one model, source or converted, and one reader.

``scheduler.py`` has requests, and decides who runs in a step and on which pages; ``runner.py`` runs the step on the
device, ``sampler.py`` chooses the next tokens, ``loop.py`` joins them. docs/loop.md reads them in that order.
"""

from mha2mla.loop.loop import Loop, Progress
from mha2mla.loop.runner import Runner
from mha2mla.loop.scheduler import Chunk, Request, Sampling, Scheduler

__all__ = ["Chunk", "Loop", "Progress", "Request", "Runner", "Sampling", "Scheduler"]
