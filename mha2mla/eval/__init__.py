"""Evaluation: what a conversion cost in quality, and what it gained in memory and speed."""

from mha2mla.eval.latency import model_latency
from mha2mla.eval.op_latency import attention_latency
from mha2mla.eval.quality import QualityReport, evaluate_quality
from mha2mla.eval.report import print_table, write_json
from mha2mla.eval.step_latency import decode_step_latency
from mha2mla.eval.tasks import evaluate_tasks
from mha2mla.predictions import Metric, Predictions

__all__ = [
    "Metric",
    "Predictions",
    "QualityReport",
    "attention_latency",
    "decode_step_latency",
    "evaluate_quality",
    "evaluate_tasks",
    "model_latency",
    "print_table",
    "write_json",
]
