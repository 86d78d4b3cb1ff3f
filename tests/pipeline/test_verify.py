"""What was written is compared with its source: measured as the models say it, exact at full rank, or not published."""

import json
import math
from dataclasses import replace
from functools import partial

import pytest
import torch

import mha2mla
from mha2mla.checkpoints import CheckpointError
from mha2mla.conversion.calibration.texts import load_text, token_windows
from mha2mla.conversion.layer import finish_layer
from mha2mla.conversion.layer_walk import LayerSteps, LayerWalk
from mha2mla.pipeline import ParityError, prepare, verify, write
from tests.conversion import tiny
from tests.conversion.tiny import SHORT, convert
from tests.folders import read_json


def test_the_report_measures_what_the_models_say(source, tmp_path):
    held_out = tiny.some_tokens(3, 50)
    report = convert(source, tmp_path / "out", evaluation=held_out)
    p, q = (tiny.logits(folder, held_out)[:, :-1].double().log_softmax(-1) for folder in (source, tmp_path / "out"))
    parity = report.parity
    assert parity.tokens == 147
    assert parity.kl == pytest.approx(float((p.exp() * (p - q)).sum(-1).mean()), rel=1e-3)
    assert parity.top1_agreement == pytest.approx(float((p.argmax(-1) == q.argmax(-1)).double().mean()))
    nll = -p.gather(-1, held_out[:, 1:, None]).mean()
    assert parity.perplexity_source == pytest.approx(float(nll.exp()), rel=1e-3)
    assert len(parity.layers) == 2 and 0 < parity.layers[0].hidden_error <= 1.5
    assert report.peak_rss_bytes > 50 << 20
    assert list(report.seconds) == ["prepare", "convert", "write", "verify", "total"]
    assert json.loads(json.dumps(report.to_dict()))["cache_ratio"] == report.cache_ratio
    assert "peak memory" in str(report)


def test_a_conversion_over_lengths_is_verified_at_both_ends(source, tmp_path):
    recipe = tiny.Recipe(preset="minimal", calibration_tokens=2048, calibration_lengths=[32, 128])
    report = convert(source, tmp_path / "out", recipe, evaluation_tokens=64)
    assert report.calibration_tokens == 2048 and report.calibrated_length == 128
    assert (report.evaluation_text, report.evaluation_length) == ("builtin:prose", 32)
    assert (report.long_evaluation_text, report.long_evaluation_length) == ("builtin:stdlib", 128)
    assert report.long_parity.tokens == 127 and report.long_parity.kl > 0 and not report.long_parity.layers
    text = load_text("builtin:stdlib", 10_000)
    window = token_windows(tiny.loaded_tokenizer(source), text, 128, 1)
    p, q = (tiny.logits(folder, window)[:, :-1].double().log_softmax(-1) for folder in (source, tmp_path / "out"))
    assert report.long_parity.kl == pytest.approx(float((p.exp() * (p - q)).sum(-1).mean()), rel=1e-3)
    assert f"{report.long_parity.perplexity_ratio:.4f} x in one of 128" in str(report)
    assert "In a window of 128 tokens of `builtin:stdlib`" in (tmp_path / "out" / "README.md").read_text()
    record = read_json(tmp_path / "out" / "conversion.json")
    assert record["long_parity"]["kl"] == report.long_parity.kl


def test_an_evaluation_text_too_short_for_the_long_window_is_said_and_no_refusal(source, tmp_path, capsys):
    (tmp_path / "text").write_text("Some ninety tokens, each of which is a letter. " * 2)
    recipe = tiny.Recipe(preset="minimal", calibration_tokens=2048, calibration_lengths=[32, 128])
    report = mha2mla.convert(
        source, tmp_path / "out", recipe, evaluation=str(tmp_path / "text"), evaluation_tokens=64, device="cpu"
    )
    assert report.parity.tokens == 62 and report.long_parity is None
    said = capsys.readouterr().err
    assert said.count("not compared with the source in a window of 128 tokens") == 1
    assert "In a window of" not in (tmp_path / "out" / "README.md").read_text()


KEPT = [".out.mha2mla-tmp", ".out.mha2mla-tmp/work"]  # finished layers are of use to another run, nothing else is


def left(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_dir())


@pytest.mark.parametrize(
    ("name", "change", "recipe", "named"),
    [
        ("o_proj.weight", lambda weight: weight * 1e3, {}, r"nats .* from the source's \(KL\); expected at most 5.58"),
        ("inv_freq", lambda table: table.flip(-1), {"cache_ratio": 1.0}, "differ from the source's"),
    ],
    ids=["worse than a guess", "full rank"],
)
def test_a_full_rank_or_lossy_result_that_is_wrong_is_thrown_away(
    name, change, recipe, named, source, tmp_path, monkeypatch
):
    """Loads, but talks nonsense."""

    def wrong(*arguments):
        tensors = finish_layer(*arguments)
        return {**tensors, name: change(tensors[name])}

    monkeypatch.setattr(prepare, "LayerWalk", partial(LayerWalk, steps=LayerSteps(finish=wrong)))
    with pytest.raises(ParityError, match=named):
        convert(source, tmp_path / "out", {**SHORT, **recipe})
    assert left(tmp_path) == KEPT


def test_a_full_rank_conversion_whose_error_is_nan_is_thrown_away(source, tmp_path, monkeypatch):
    measure = verify.compare
    monkeypatch.setattr(
        verify, "compare", lambda *args, **keys: replace(measure(*args, **keys), logits_relative_error=math.nan)
    )
    with pytest.raises(ParityError, match="differ from the source's by nan"):
        convert(source, tmp_path / "out", tiny.Recipe(cache_ratio=1.0, **SHORT))
    assert left(tmp_path) == KEPT


def test_a_checkpoint_of_other_names_than_the_models_is_never_published(source, tmp_path, monkeypatch):
    class OneMore(write.ShardedWriter):
        def finish(self):
            self.add("model.layers.0.self_attn.extra", torch.ones(1))
            super().finish()

    class OneLess(write.ShardedWriter):
        def add(self, name, tensor):
            if name != "model.norm.weight":
                super().add(name, tensor)

    for writer, named in ((OneMore, "self_attn.extra"), (OneLess, "model.norm.weight")):
        monkeypatch.setattr(write, "ShardedWriter", writer)
        with pytest.raises(CheckpointError, match=f"written tensors are not the model's: .*{named}"):
            convert(source, tmp_path / writer.__name__)
        assert not (tmp_path / writer.__name__).exists()
