"""Rules and texts of users: objects in recipes, in records, and after a conversion."""

import importlib.util
import linecache
import re
import subprocess
import sys
from dataclasses import dataclass

import pytest
import torch

import mha2mla
from mha2mla.conversion.extension import PLUGINS, RecipeObject
from mha2mla.conversion.latent.rules import SvdJoint
from mha2mla.conversion.recipe import Recipe, normalize_keys, stages_of
from mha2mla.conversion.resume import ResumeError
from mha2mla.conversion.rope import ByFrequency, RopeRule, Scored, TwoNorm
from mha2mla.conversion.stages import Fit
from mha2mla.pipeline import run
from tests.conversion import tiny
from tests.conversion.tiny import SHORT, convert


@dataclass(frozen=True)
class Middle(Scored):
    """Pairs next to one frequency."""

    centre: int = 3
    reads_statistics = False

    def scores(self, problem):
        index = torch.arange(problem.spec.head_dim // 2, dtype=torch.float64)[:, None]
        return -(index - self.centre).abs().expand(-1, problem.spec.num_key_value_heads)


@dataclass(frozen=True)
class Narrow(mha2mla.LowRankRule):
    """Factors of another rank than asked for."""

    def factors(self, problem, rank, *, centered):
        return SvdJoint().factors(problem, rank - 8, centered=centered)


@dataclass(frozen=True)
class Counting(mha2mla.CalibrationSource):
    """Tokens that count up."""

    first: int = 2

    def windows(self, tokenizer, length, count, *, seed):
        return self.first + torch.arange(count * length).view(count, length) % 250


@dataclass(frozen=True)
class Other(mha2mla.CalibrationSource):
    """Windows of another length, or more of them than asked for."""

    longer: int
    more: int

    def windows(self, tokenizer, length, count, *, seed):
        return torch.zeros(count * self.more, length + self.longer, dtype=torch.int64)


PATH = {"class": f"{__name__}:Middle", "centre": 5}


def test_objects_with_a_name_are_that_name():
    for keys in ({"rope": TwoNorm()}, {"rope.selection": TwoNorm()}, {"rope": {"selection": TwoNorm()}}):
        recipe = Recipe(**keys)
        assert recipe == Recipe(**{"rope.selection": "2-norm"}) and recipe.to_dict()["rope"]["selection"] == "2-norm"
    assert Recipe(low_rank=SvdJoint()).latent.rule == "svd-joint"
    assert Recipe(rope=ByFrequency(-1)).rope.selection == "high"


def test_objects_are_recorded_by_path_and_fields():
    recipe = Recipe(rope=Middle(5), low_rank=Narrow(), calibration=Counting())
    assert recipe.rope_rule == Middle(5) and recipe.low_rank_rule == Narrow() and recipe.calibration_text == Counting()
    record = recipe.to_dict()
    assert record["rope"]["selection"] == PATH and record["calibration"]["text"]["first"] == 2
    assert Recipe.from_dict(record) == recipe and recipe.changes()["rope.selection"] == PATH
    assert recipe.for_records() == recipe


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"rope": SvdJoint()}, "recipe stage 'rope' is SvdJoint(); expected a mapping of its keys"),
        ({"rope.selection": SvdJoint()}, "rope.selection is SvdJoint(); expected one of 'high'"),
        ({"rope.selection": {"class": "os:system"}}, "rope.selection is of class 'os:system'; expected one that is"),
        ({"rope.selection": {"class": "nowhere:Rule"}}, "rope.selection is of class 'nowhere:Rule'"),
        ({"rope.selection": {**PATH, "centre": 5, "width": 1}}, "expected the fields of its class"),
        ({"low_rank": "svd-joint"}, "recipe key 'low_rank' is unknown"),
    ],
)
def test_objects_of_other_kinds_are_refused(keys, named):
    with pytest.raises(ValueError, match=re.escape(named)):
        Recipe(**keys)


def test_register_refuses_what_no_recipe_takes():
    with pytest.raises(ValueError, match="Fit is registered as 'mine'; expected a frozen dataclass of a RopeRule"):
        mha2mla.register("mine")(Fit)
    with pytest.raises(ValueError, match="rope.selection 'high' is ByFrequency already; expected another name"):
        mha2mla.register("high")(Middle)
    assert RopeRule.find("high") == ByFrequency(-1)


def test_entry_points_register_names_for_files_and_flags(tmp_path, monkeypatch):
    (tmp_path / "my_rules-1.dist-info").mkdir()
    (tmp_path / "my_rules-1.dist-info" / "entry_points.txt").write_text(f"[{PLUGINS}]\nmine = my_rules\n")
    (tmp_path / "my_rules.py").write_text(
        "import mha2mla\nfrom tests.pipeline.test_extension import Middle\nmha2mla.register('mid')(Middle)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(RecipeObject, "_named", dict(RecipeObject._named))
    assert stages_of("minimal", {"rope.selection": "mid"})["rope"].selection == "mid"
    assert Recipe(**{"rope.selection": "mid"}).rope_rule == Middle()


def test_a_rule_that_breaks_its_contract_is_named(source, tmp_path):
    with pytest.raises(ValueError, match=r"Narrow.factors gave a decoder torch.float64 \(64, 24\) on cpu; expected"):
        convert(source, tmp_path / "out", {**SHORT, "low_rank": Narrow()})
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("text", "found"), [(Other(-32, 1), "8 of length 32"), (Other(0, 7), "56 of length 64")])
def test_windows_that_were_not_asked_for_are_refused(text, found, source, tmp_path):
    with pytest.raises(ValueError, match=rf"calibration Other\(.*windows gave {found}; expected at most 8 of 64"):
        convert(source, tmp_path / "out", {**SHORT, "calibration.text": text})


def test_a_checkpoint_loads_without_the_class_that_made_it(source, tmp_path):
    (tmp_path / "gone.py").write_text(
        "from dataclasses import dataclass\nfrom mha2mla.conversion.rope import TwoNorm\n"
        "@dataclass(frozen=True)\nclass Mine(TwoNorm):\n    pass\n"
    )
    convert_it = (
        "import sys; sys.path.insert(0, sys.argv[1]); import gone, mha2mla; mha2mla.convert(sys.argv[2], sys.argv[3],"
        " preset='minimal', layout='shared', rope=gone.Mine(), calibration={'tokens': 64, 'lengths': 64, 'text':"
        " 'builtin:prose'}, evaluation_tokens=64, device='cpu', progress=False)"
    )
    out = tmp_path / "out"
    subprocess.run([sys.executable, "-c", convert_it, str(tmp_path), str(source), str(out)], check=True)
    config = mha2mla.MHA2MLAConfig.from_pretrained(out)
    assert config.recipe["rope"]["selection"] == {"class": "gone:Mine"} and "gone" not in sys.modules
    assert tiny.logits(out, tiny.some_tokens(1, 8)).isfinite().all()


def test_an_interrupted_run_compares_the_fields_of_its_rule(source, tmp_path, monkeypatch):
    keys = {**SHORT, "layout": "shared", "calibration.text": Counting()}
    monkeypatch.setattr(run, "write_weights", lambda *arguments: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        convert(source, tmp_path / "out", {**keys, "rope": Middle(5)})
    monkeypatch.undo()
    with pytest.raises(ResumeError, match=r"recipe.rope.selection.centre \(5 there, 4 now\)"):
        convert(source, tmp_path / "out", {**keys, "rope": Middle(4)})
    with pytest.raises(ResumeError, match="calibration.text.first"):
        convert(source, tmp_path / "out", {**keys, "rope": Middle(5), "calibration.text": Counting(3)})
    report = convert(source, tmp_path / "out", {**keys, "rope": Middle(5)})
    assert report.resumed_layers == report.num_layers and report.recipe["rope"]["selection"] == PATH


MINE = "@dataclass(frozen=True)\nclass Mine(Middle):\n    '{}'\n"
BASE = MINE.replace("Mine", "Base") + MINE.replace("Middle", "Base").format("")


@pytest.mark.parametrize("classes", [MINE, BASE], ids=["its class", "its base"])
def test_an_interrupted_run_compares_the_code_of_its_rule(classes, source, tmp_path, monkeypatch):
    head = "from dataclasses import dataclass\nfrom tests.pipeline.test_extension import Middle\n"

    def rule(comment):
        (tmp_path / "edited.py").write_text(head + classes.format(comment))
        spec = importlib.util.spec_from_file_location("edited", tmp_path / "edited.py")
        sys.modules["edited"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules["edited"])
        linecache.clearcache()
        return {**SHORT, "layout": "shared", "rope": sys.modules["edited"].Mine()}

    with monkeypatch.context() as patch:
        patch.setattr(run, "write_weights", lambda *arguments: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            convert(source, tmp_path / "out", rule("the first"))
    with pytest.raises(ResumeError, match="differs in code of.rope.selection"):
        convert(source, tmp_path / "out", rule("the second, longer"))
    assert convert(source, tmp_path / "out", rule("the first")).resumed_layers == 2


def test_convert_normalises_its_keys_once(source, tmp_path):
    calls, code = [], normalize_keys.__code__
    sys.setprofile(lambda frame, event, _: event == "call" and frame.f_code is code and calls.append(1))
    try:
        convert(source, tmp_path / "out", {**SHORT, "rope": {"share": 0.3}}, layout="shared")
    finally:
        sys.setprofile(None)
    assert len(calls) == 1
