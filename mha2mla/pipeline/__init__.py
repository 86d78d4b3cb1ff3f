"""convert = check → prepare → write → verify → report: each stage is a module, and refuses or resumes by itself."""

from mha2mla.pipeline.report import ConversionReport
from mha2mla.pipeline.run import convert
from mha2mla.pipeline.verify import ParityError

__all__ = ["ConversionReport", "ParityError", "convert"]
