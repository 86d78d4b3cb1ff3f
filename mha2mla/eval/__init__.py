"""Evaluation: loss of quality by a conversion, and its gain in memory and speed."""

from mha2mla.conversion.predictions import Metric, Predictions
from mha2mla.eval.latency import decode_step_latency, model_latency
from mha2mla.eval.op_latency import attention_latency
from mha2mla.eval.quality import QualityReport, evaluate_quality
from mha2mla.eval.report import print_table, write_json
from mha2mla.eval.tasks import evaluate_tasks

__all__ = [
    "Metric", "Predictions", "QualityReport", "attention_latency", "decode_step_latency", "evaluate_quality",
    "evaluate_tasks", "model_latency", "print_table", "write_json",
]  # fmt: skip
