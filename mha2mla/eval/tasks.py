"""Tasks of lm-evaluation-harness on a converted model and its source: the share of each score that is kept.

lm-eval has no hook by which a package could announce a model, so :func:`register` does it when it is asked to; after
that, lm-eval's own functions know the model ``mha2mla`` as well.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from mha2mla.eval.loading import load_model, load_tokenizer

MODEL_NAME = "mha2mla"
_FEWSHOT_SEED = 1234  # lm-eval's own
_BOOTSTRAP_SAMPLES = 1000  # for standard errors that have no formula
COLUMNS = {
    "task": "task",
    "metric": "metric",
    "filter": "filter",
    "higher_is_better": "higher is better",
    "num_samples": "samples",
    "source": "source",
    "converted": "converted",
    "recovery": "recovery",
    "stderr_source": "± source",
    "stderr_converted": "± converted",
}


@dataclass(frozen=True)
class TaskRow:
    """One metric of one task, source beside converted.

    Attributes:
        task, metric, filter: lm-eval's names.
        higher_is_better: what lm-eval says of the metric; None where it does not say.
        num_samples: documents that were scored; None for a group.
        stderr_source, stderr_converted: its standard error; None where lm-eval gives none.
    """

    task: str
    metric: str
    filter: str
    higher_is_better: bool | None
    num_samples: int | None
    source: float
    converted: float
    stderr_source: float | None
    stderr_converted: float | None

    @property
    def recovery(self) -> float | None:
        """Converted over source; 1 means that nothing was lost. None where the source has 0."""
        return self.converted / self.source if self.source else None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"recovery": self.recovery}


def register() -> type:
    """Registers the model ``mha2mla`` with lm-eval: ``simple_evaluate(model="mha2mla", model_args={"pretrained": …})``.

    Its argument ``pretrained`` is a folder, a hub id or a loaded model, source or converted; the others are those of
    lm-eval's model ``hf``.

    Returns:
        The class; the same one at every call.

    Raises:
        ImportError: lm-eval is not installed.
    """
    try:
        from lm_eval.api.registry import MODEL_REGISTRY, register_model
        from lm_eval.models.huggingface import HFLM
    except ImportError as error:
        raise ImportError("tasks need lm-eval: pip install -e '.[eval]' in the clone") from error
    if MODEL_NAME in MODEL_REGISTRY:
        return MODEL_REGISTRY[MODEL_NAME]

    @register_model(MODEL_NAME)
    class MHA2MLALM(HFLM):
        """lm-eval's model over a checkpoint that this package loads."""

        def __init__(
            self,
            pretrained: Any,
            tokenizer: Any = None,
            device: str | None = None,
            dtype: str | torch.dtype | None = None,
            **arguments: Any,
        ) -> None:
            if tokenizer is None:
                tokenizer = load_tokenizer(pretrained, "pretrained")
            dtype = None if dtype == "auto" else dtype
            model = load_model(pretrained, "pretrained", device=device, dtype=dtype)
            super().__init__(pretrained=model, tokenizer=tokenizer, **arguments)

    return MHA2MLALM


def evaluate_tasks(
    source: Any,
    converted: Any,
    tasks: Sequence[str] | None = None,
    *,
    folder: str | os.PathLike[str] | None = None,
    num_fewshot: int | None = None,
    limit: int | None = None,
    batch_size: int = 8,
    tokenizer: Any = None,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
) -> list[TaskRow]:
    """Runs tasks of lm-eval on both models, one after the other, on the same documents.

    Args:
        source, converted: folder, hub id, or a loaded causal language model.
        tasks: names of lm-eval (whose data come from the hub) or of ``folder``; default every task of ``folder``.
        folder: of YAML files that describe further tasks, such as ones with local data; relative ``data_files`` in them
            start from the working directory, as everywhere in lm-eval.
        num_fewshot: examples before each question; default the task's own.
        limit: documents of each task at most.
        tokenizer: needed when ``source`` is a loaded model; otherwise each folder's own.
        device: where to compute; default CUDA when there is one.
        dtype: what folders are loaded as; default what they hold.

    Returns:
        A row for each metric of each task, and of each group of tasks that has a score of its own.

    Raises:
        ImportError: lm-eval is not installed.
        ValueError: no tasks are named, or one is not known.
        FileNotFoundError: no such folder.
    """
    model_class = register()
    from lm_eval.evaluator import evaluate
    from lm_eval.tasks import TaskManager

    if folder is not None and not Path(folder).is_dir():
        raise FileNotFoundError(f"folder is {str(folder)!r}; expected a folder with lm-eval tasks as YAML files")
    if not tasks and folder is None:
        raise ValueError("tasks is empty and folder is None; expected names of tasks, a folder with tasks, or both")
    include = None if folder is None else str(folder)
    own = TaskManager(include_path=include, include_defaults=False)
    tasks = list(tasks or own.all_subtasks)
    if not tasks:
        raise ValueError(
            f"folder is {str(folder)!r}, in which lm-eval finds no task; expected YAML files with a 'task'"
        )
    # Reading lm-eval's own thousands of files takes seconds.
    manager = own if set(tasks) <= set(own.all_tasks) else TaskManager(include_path=include)
    if unknown := [task for task in tasks if not manager.match_tasks([task])]:
        raise ValueError(f"tasks has {unknown[0]!r}; expected names that lm-eval knows, or tasks of folder {folder}")
    results = []
    for model, name in ((source, "source"), (converted, "converted")):
        own_tokenizer = tokenizer if tokenizer is not None else load_tokenizer(model, name)
        loaded = model_class(load_model(model, name, device=device, dtype=dtype), own_tokenizer, batch_size=batch_size)
        # lm-eval's simple_evaluate would seed the process, and list its packages for seconds at every call.
        found = manager.load(tasks)
        for task in found["tasks"].values():
            _set_fewshot(task, num_fewshot)
        results.append(evaluate(loaded, found, limit=limit, log_samples=False, bootstrap_iters=_BOOTSTRAP_SAMPLES))
        del loaded
    return _rows(*results)


def _set_fewshot(task: Any, count: int | None) -> None:
    """Sets few-shot examples like ``simple_evaluate``: the same for both models, none where a task rules them out."""
    own = task.get_config("num_fewshot")
    task.set_config(key="num_fewshot", value=own if own == 0 or count is None else count)
    if task.get_config("num_fewshot") is None:
        task.set_config(key="num_fewshot", value=0)
    task.set_fewshot_seed(seed=_FEWSHOT_SEED)


def _rows(source: Mapping[str, Any], converted: Mapping[str, Any]) -> list[TaskRow]:
    rows = []
    scores, others = ({**result["results"], **result.get("groups", {})} for result in (source, converted))
    for task, metrics in scores.items():
        for key, value in metrics.items():
            metric, _, kept = key.partition(",")
            if not kept or metric.endswith("_stderr") or not isinstance(value, int | float):
                continue  # "alias", counts, and the standard errors that stand beside their metric
            error = f"{metric}_stderr,{kept}"
            rows.append(
                TaskRow(
                    task=task,
                    metric=metric,
                    filter=kept,
                    higher_is_better=source.get("higher_is_better", {}).get(task, {}).get(metric),
                    num_samples=source.get("n-samples", {}).get(task, {}).get("effective"),
                    source=float(value),
                    converted=float(others[task][key]),
                    stderr_source=_number(metrics.get(error)),
                    stderr_converted=_number(others[task].get(error)),
                )
            )
    return rows


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) else None  # lm-eval writes "N/A"
