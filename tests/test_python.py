"""The package as Python sees it: what it exports, what reports look like, what types say."""

import ast
import inspect
import shutil
import typing
from importlib.resources import files
from pathlib import Path

import pytest
import torch

import mha2mla
from mha2mla.conversion.presets import PRESETS, PresetName

ROOT = Path(__file__).parents[1]


def test_everything_exported_is_there_and_known_to_type_checkers():
    tree = ast.parse((ROOT / "mha2mla" / "__init__.py").read_text())
    typed = next(node for node in tree.body if isinstance(node, ast.If))
    names = {alias.asname or alias.name for node in typed.body[:-1] for alias in node.names}
    names.add(typed.body[-1].target.id)
    assert set(mha2mla.__all__) == names == {"__version__", *mha2mla._LAZY}
    for name in set(mha2mla.__all__) - {"__version__"}:
        assert getattr(mha2mla, name) is not None and name in dir(mha2mla)
    assert {"convert", "Recipe", "load", "evaluate_quality", "model_latency", "inspect", "presets"} <= names
    assert mha2mla.presets is PRESETS
    assert files("mha2mla").joinpath("py.typed").is_file()
    assert '"py.typed"' in (ROOT / "pyproject.toml").read_text()


def test_choices_are_literal_types():
    def choices(function, name):
        hints = typing.get_type_hints(function)[name]
        return {value for each in (hints, *typing.get_args(hints)) for value in typing.get_args(each)} - {type(None)}

    assert choices(mha2mla.convert, "preset") >= set(typing.get_args(PresetName))
    assert choices(mha2mla.convert, "resume") == {"auto", "never"}
    assert choices(mha2mla.model_latency, "backend") >= {"tilelang", "reference"}


def test_load_gives_model_and_tokenizer_of_a_folder(tiny_converted, tiny_source):
    for folder, kind in ((tiny_converted, "mha2mla"), (tiny_source, "llama")):
        model, tokenizer = mha2mla.load(folder, device="cpu", dtype=torch.bfloat16)
        assert model.config.model_type == kind and model.dtype == torch.bfloat16 and not model.training
        ids = tokenizer("The latent", return_tensors="pt")
        assert model.generate(**ids, max_new_tokens=3, do_sample=False).shape[1] > ids["input_ids"].shape[1]
    with pytest.raises(FileNotFoundError, match="checkpoint is '/no/such/folder'"):
        mha2mla.load("/no/such/folder")


def test_a_dtype_may_be_a_name(tiny_source, tiny_converted):
    model, _ = mha2mla.load(tiny_source, device="cpu", dtype="bfloat16")
    assert model.dtype == torch.bfloat16
    expected = "dtype is 'foo'; expected one of float32, bfloat16, float16, float64"
    for function, folder in ((mha2mla.load, tiny_source), (mha2mla.inspect, tiny_converted)):
        with pytest.raises(ValueError, match=expected) as error:
            function(folder, dtype="foo")
        assert error.type is ValueError


def test_a_folder_without_tokenizer_is_named(tiny_source, tmp_path):
    """The message of transformers names no folder, where two of them were given."""
    shutil.copytree(tiny_source, tmp_path / "bare", ignore=shutil.ignore_patterns("tokenizer*"))
    with pytest.raises(ValueError, match="checkpoint '.*bare' has no tokenizer files; copy them from the original"):
        mha2mla.load(tmp_path / "bare", device="cpu")


def test_reports_print_a_summary(tiny_source, tiny_converted):
    found = mha2mla.inspect(tiny_converted)
    quality = mha2mla.evaluate_quality(
        tiny_source, tiny_converted, texts="builtin:prose", lengths=[32], max_tokens=64, device="cpu", progress=False
    )
    for report, fewest, most in ((found, 5, 14), (quality, 1, 1)):
        assert repr(report) == str(report) and fewest <= len(str(report).splitlines()) <= most
        html = report._repr_html_()
        assert html.startswith("<table>") and html.count("<table>") == html.count("</table>")
    assert f"{quality.rows[0].perplexity_ratio:.4f} x" in str(quality) and "decode on CUDA" in str(found)


def test_functions_of_the_package_have_types():
    for name in ("convert", "load", "evaluate_quality", "model_latency", "inspect"):
        signature = inspect.signature(getattr(mha2mla, name))
        annotations = [parameter.annotation for parameter in signature.parameters.values()]
        assert signature.empty not in [*annotations, signature.return_annotation], name
