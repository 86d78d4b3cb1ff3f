"""Every page of examples/ runs, and checks its own numbers."""

import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import mha2mla
from mha2mla.environment import cache_folder
from mha2mla.kernels import DecodePlan
from tests.gpu import graph_of

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.py"))
NEEDS = {"lm_eval_task": "lm_eval", "lora": "peft", "serve_vllm": "vllm"}


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_runs(path, monkeypatch):
    assert len(path.read_text().splitlines()) <= 60
    if path.stem in NEEDS:
        pytest.importorskip(NEEDS[path.stem])
    if path.stem == "serve_vllm" and not torch.cuda.is_available():
        pytest.skip("no CUDA device on this machine")
    monkeypatch.setattr("sys.argv", [str(path)])
    runpy.run_path(str(path), run_name="__main__")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """SmolLM2 and a conversion of it, calibrated on little."""
    source, folder = cache_folder() / "SmolLM2-135M-Instruct", tmp_path_factory.mktemp("converted") / "mla"
    if not source.is_dir():
        pytest.skip(f"{source} is not there")
    keys = {"preset": "minimal", "calibration": {"tokens": 512, "lengths": 256}, "evaluation_tokens": 256}
    mha2mla.convert(source, folder, progress=False, **keys)
    return {"source": source, "converted": folder}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "takes"),
    [
        *(("my_backend", "source"), ("my_metric", "source")),
        *(("lora", "converted"), ("long_document_chat", "converted")),
    ],
)
def test_example_takes_a_trained_model(name, takes, trained):
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    subprocess.run([sys.executable, EXAMPLES[0].with_name(f"{name}.py"), trained[takes]], check=True)


def test_flashmla_runs_in_inference_mode(monkeypatch):
    """Engines call it there, where tensors have no version by which a change of lengths would be seen."""
    refresh, refreshed = DecodePlan.refresh, []

    def counted(plan, *lengths):
        refreshed.append(lengths[0].tolist())
        refresh(plan, *lengths)

    monkeypatch.setattr(DecodePlan, "refresh", counted)
    functions = runpy.run_path(str(Path(__file__).parents[1] / "examples" / "flashmla.py"))
    decode = functions["flash_mla_with_kvcache"]
    with torch.inference_mode():
        q, cache = torch.randn(2, 1, 3, 40), torch.randn(4, 64, 1, 40)
        table = torch.tensor([[2, 0], [1, 3]], dtype=torch.int32)
        lengths = torch.tensor([70, 128], dtype=torch.int32)
        metadata, _ = functions["get_mla_metadata"](lengths, 3, 1, is_fp8_kvcache=False)  # as vLLM and SGLang do
        for taken in (0, 9):
            lengths -= taken
            out, _ = decode(q, cache, table, lengths, 24, metadata)
            for b, n in enumerate(lengths.tolist()):
                keys = cache[table[b].long(), :, 0].flatten(0, 1)[:n]
                expected = (q[b, 0] @ keys.T * 40**-0.5).softmax(-1) @ keys[:, :24]
                torch.testing.assert_close(out[b, 0], expected, rtol=1e-4, atol=1e-4)
    assert refreshed[1:] == [[61, 119]]  # after the plan itself


@pytest.mark.gpu
def test_flashmla_in_a_graph_takes_the_lengths_of_its_replay():
    decode = runpy.run_path(str(EXAMPLES[0].with_name("flashmla.py")))["flash_mla_with_kvcache"]
    q, cache = (torch.randn(*shape, dtype=torch.bfloat16, device="cuda") for shape in ((2, 1, 3, 40), (4, 64, 1, 40)))
    table = torch.tensor([[2, 0], [1, 3]], dtype=torch.int32, device="cuda")
    lengths, metadata = torch.tensor([70, 128], dtype=torch.int32, device="cuda"), SimpleNamespace(plan=None)

    def step():
        return decode(q, cache, table, lengths, 24, metadata)

    step()  # compiles and plans
    graph, (out, _) = graph_of(step)
    lengths -= 9
    graph.replay()
    for b, n in enumerate(lengths.tolist()):
        keys = cache[table[b].long(), :, 0].flatten(0, 1)[:n].double()
        expected = (q[b, 0].double() @ keys.T * 40**-0.5).softmax(-1) @ keys[:, :24]
        torch.testing.assert_close(out[b, 0].double(), expected, rtol=2e-2, atol=2e-2)
