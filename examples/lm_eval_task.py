"""Source and converted on a local task of lm-eval, by this package and by lm-eval alone. Needs lm-eval; no network.

python examples/lm_eval_task.py [SOURCE CONVERTED]    # default: a tiny random Llama and its conversion
"""

import json
import sys
import tempfile
from pathlib import Path

import yaml
from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager

import mha2mla
from mha2mla.eval import evaluate_tasks
from mha2mla.trial_models import tiny_checkpoint

QUESTIONS = [
    {"question": f"{a} plus {b} is", "choices": [" 1", " 2", " 3"], "answer": a + b - 1}
    for a, b in ((0, 1), (1, 1), (2, 1))
]
TASK = {
    "task": "local_sums",
    "dataset_path": "json",
    "test_split": "test",
    "output_type": "multiple_choice",
    "doc_to_text": "{{question}}",
    "doc_to_choice": "choices",
    "doc_to_target": "answer",
    "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
}


def main(source: str, converted: str, work: Path) -> None:
    tasks = work / "tasks"
    tasks.mkdir()
    (tasks / "sums.jsonl").write_text("".join(json.dumps(each) + "\n" for each in QUESTIONS))
    files = {"data_files": {"test": str(tasks / "sums.jsonl")}, "cache_dir": str(work / "cache")}
    (tasks / "sums.yaml").write_text(yaml.safe_dump(TASK | {"dataset_kwargs": files}))
    (row,) = evaluate_tasks(source, converted, folder=tasks, device="cpu")  # mha2mla eval tasks --folder
    print(f"{row.task}: source {row.source:.2f}, converted {row.converted:.2f}")

    # lm-eval knows nothing of this package: the folder brings its own code.
    hf = f"pretrained={converted},trust_remote_code=True,dtype=float32"
    manager = TaskManager(include_path=str(tasks), include_defaults=False)
    alone = simple_evaluate("hf", model_args=hf, tasks=["local_sums"], device="cpu", task_manager=manager)
    assert alone["results"]["local_sums"]["acc,none"] == row.converted


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        work, keys = Path(folder), {"preset": "minimal", "calibration": {"tokens": 512, "lengths": 64}}
        if not sys.argv[1:]:
            mha2mla.convert(
                tiny_checkpoint(work / "source"), work / "mla", **keys, evaluation_tokens=256, progress=False
            )
        main(*(sys.argv[1:] or (str(work / "source"), str(work / "mla"))), work)
