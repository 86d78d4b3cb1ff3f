"""Pictures of measured rows: which curves they have, and what their headlines say."""

import math

import pytest

from mha2mla.eval import plots


def _row(text, seqlen, ratio, **others):
    return {"text": f"builtin:{text}", "seqlen": seqlen, "perplexity_ratio": ratio, **others}


LOSSES = [_row("prose", 512, 1.01), _row("prose", 2048, 1.02), _row("stdlib", 512, 1.05), _row("stdlib", 2048, 1.04)]


def _curves(panel):
    return {curve.name: curve.drawn() for curve in panel.curves}


def test_loss_by_length_has_a_panel_for_each_text():
    (picture,) = plots.loss_by_length({"latent": LOSSES})
    assert picture.headline.endswith("on the worst text: +5.0 % at 512, +4.0 % at 2,048 tokens")
    assert [panel.title for panel in picture.panels] == ["prose", "stdlib"]
    assert _curves(picture.panels[0]) == {"source": [(512, 1), (2048, 1)], "latent": [(512, 1.01), (2048, 1.02)]}


def test_more_than_three_conversions_are_several_pictures():
    pictures = plots.loss_by_length({str(place): LOSSES for place in range(4)})
    assert [len(picture.panels[0].curves) for picture in pictures] == [4, 2]


def test_headline_of_several_conversions_names_the_ends():
    (picture,) = plots.loss_by_length({"b": LOSSES, "a": LOSSES[:2]})
    assert picture.headline.endswith("+2.0 % (a) to +4.0 % (b) in the longest windows")


@pytest.mark.parametrize("ratio", [math.inf, "inf", math.nan])  # "inf" is how JSON has it
def test_broken_models_are_drawn_too(ratio):
    pytest.importorskip("matplotlib")
    (picture,) = plots.loss_by_length({"latent": [_row("prose", 512, ratio)]})
    assert "source" in picture.svg()


@pytest.mark.parametrize("place", [0, 1])
def test_a_text_of_nan_is_the_worst(place):
    ratios = [1.02, 1.02]
    ratios[place] = "nan"  # as JSON has it
    rows = [
        _row(text, 512, ratio, cache_share=0.5, first=0, stop=512) for text, ratio in zip("ab", ratios, strict=True)
    ]
    assert math.isnan(plots.worst_losses(rows)[512])
    (picture,) = plots.loss_by_bytes({"latent": rows}, {})
    (converted,) = (curve for curve in picture.panels[0].curves if curve.name == "converted")
    assert math.isnan(converted.points[0][1])
    headlines = [plots.loss_by_length({"b": rows, "a": LOSSES})[0].headline]
    headlines += [plots.loss_by_position({"latent": rows})[0].headline]
    assert headlines[0].endswith("+4.0 % (a) to nan × (b) in the longest windows")
    assert headlines[1].endswith("nan × at its start, nan × at its end")


def test_loss_by_position_holds_each_part():
    parts = [_row("prose", 64, ratio, first=16 * place, stop=16 * place + 16) for place, ratio in enumerate((1.1, 1.2))]
    (picture,) = plots.loss_by_position({"latent": parts})
    assert _curves(picture.panels[0])["latent"] == [(0, 1.1), (16, 1.2), (32, 1.2)]
    assert picture.headline.endswith("+10.0 % at its start, +20.0 % at its end")


def test_loss_by_bytes_has_the_caches_of_both_models():
    rows = [
        _row("prose", 512, 1.05, cache="16 bits", cache_share=0.5),
        _row("stdlib", 512, 1.10, cache="16 bits", cache_share=0.5),
        _row("prose", 512, 1.15, cache="latent 4 bits, importance", cache_share=0.125),
        _row("prose", 512, 1.06, cache="rotary keys int8", cache_share=0.75),
        _row("prose", 512, 1.02, cache="source, KV 4 bits, keys by channel", cache_share=0.27),
        _row("prose", 512, 1.04, cache="source, KV 4 bits, keys by token", cache_share=0.28),
    ]
    ((panel,),) = (picture.panels for picture in plots.loss_by_bytes({"latent": rows}, {}))
    assert _curves(panel) == {
        "source, KV codes": [(0.27, 1.02), (1.0, 1.0)],  # keys by token are worse at more bytes
        "converted": [(0.5, 1.1)],
        "rotary keys kept": [(0.75, 1.06)],
        "latent codes": [(0.125, 1.15)],
    }


def test_loss_by_bytes_takes_shares_of_older_records():
    rows = [_row("prose", 512, 1.05), _row("prose", 2048, 1.06)]
    (picture,) = plots.loss_by_bytes({"latent": rows}, {"latent": 0.5})
    assert [_curves(panel)["converted"] for panel in picture.panels] == [[(0.5, 1.05)], [(0.5, 1.06)]]
    assert plots.loss_by_bytes({"latent": rows}, {}) == []


def test_probes_are_drawn_by_measure_and_probe():
    row = {"chance": 0.1, "source": 0.9, "converted": 0.5, "retained": 0.5}
    kinds = (("one key", "accuracy"), ("sums", "accuracy"), ("span", "gain"))
    rows = [row | {"probe": name, "measure": each, "length": length} for name, each in kinds for length in (512, 2048)]
    choices, gains = plots.probes(rows)
    assert [panel.title for panel in choices.panels] == ["one key", "sums"] and "at least 50 %" in choices.headline
    assert _curves(gains.panels[0])["converted"] == [(512, 0.5), (2048, 0.5)]


@pytest.mark.parametrize("least", ["nan", "-inf"])
def test_probes_without_a_number_are_the_least_kept(least):
    """As JSON has them: a model that overflows still has a page."""
    row = {"probe": "span", "measure": "gain", "length": 512, "chance": 0.0, "source": 2.0, "converted": 1.0}
    rows = [row | {"retained": 0.5}, row | {"retained": least, "converted": least, "length": 1024}]
    (picture,) = plots.probes(rows)
    assert f"at least {least} %" in picture.headline and _curves(picture.panels[0])["source"][-1] == (1024, 2.0)


def test_probes_of_other_caches_are_not_drawn():
    row = {"probe": "sums", "measure": "accuracy", "length": 512, "chance": 0.1, "source": 0.9}
    own = row | {"cache": "16 bits", "converted": 0.8, "retained": 0.875}
    beside = [
        row | {"cache": cache, "converted": 0.2, "retained": 0.125}
        for cache in ("source, KV 4 bits, keys by channel", "latent 3 bits, importance", "rotary keys int8")
    ]
    (picture,) = plots.probes([own, *beside])
    assert _curves(picture.panels[0])["converted"] == [(512, 0.8)]
    assert "1 probes" in picture.headline and "at least 88 %" in picture.headline


def test_probes_where_the_source_is_at_chance_say_so():
    row = {"probe": "sums", "measure": "accuracy", "length": 512, "chance": 0.1, "source": 0.1, "converted": 0.1}
    (picture,) = plots.probes([row | {"retained": None}])
    assert picture.headline == "Far context, 1 probes of answers: the source is at chance"


@pytest.mark.parametrize("layers", [1, 126])
def test_picture_of_layers_stays_small(layers, tmp_path):
    pytest.importorskip("matplotlib")
    keys = enumerate(plots.LAYER_COLUMNS)  # jagged curves, as a PNG likes least
    rows = [{"layer": layer} for layer in range(layers)]
    for place, key in keys:
        for row in rows:
            row[key] = 0.01 + (row["layer"] * (7 + 3 * place) % 11) / 10
    plots.loss_by_layer(rows).save(tmp_path / "plot.png")
    assert 1000 < (tmp_path / "plot.png").stat().st_size < 100_000


def test_layers_leave_out_what_has_no_logarithm():
    values = [0.0, math.inf, math.nan, None, 0.5]
    picture = plots.loss_by_layer([{"layer": layer, "score_error": value} for layer, value in enumerate(values)])
    assert _curves(picture.panels[0])["scores"] == [(4, 0.5)] and "not finite" in picture.headline


def _timed(op, implementation, batch, seqlen, us, **others):
    row = {"op": op, "implementation": implementation, "batch": batch, "seqlen": seqlen, "us_p50": us, "status": "ok"}
    return row | others


def test_latencies_take_the_fastest_source():
    rows = [
        _timed("attention", name, batch, 512, us * batch)
        for batch in (1, 8)
        for name, us in (("SDPA flash", 9.0), ("gqa_decode", 6.0), ("mla_decode (tilelang)", 2.0))
    ]
    rows += [{"op": "attention", "implementation": "FlashAttention-3", "batch": 1, "seqlen": 512, "status": "missing"}]
    (picture,), table = plots.latencies(rows, "attention")
    assert [line["speed_up"] for line in table] == [3.0, 3.0]
    assert table[1] | {"speed_up": 0} == {"batch": 8, "seqlen": 512, "source": 48.0, "converted": 16.0, "speed_up": 0}
    assert [panel.title for panel in picture.panels] == ["512 cached tokens", ""] and picture.columns == 1
    assert _curves(picture.panels[0])["source"] == [(1, 6.0), (8, 48.0)], "one length is drawn over the batch"
    assert "runs at 3 times the source's speed" in picture.headline


def test_latencies_prefer_the_time_of_a_graph():
    rows = [_timed("decode step", name, 1, 512, 9e3, us_graph=us) for name, us in (("source", 4e3), ("converted", 2e3))]
    _, table = plots.latencies(rows, "decode step")
    assert table == [{"batch": 1, "seqlen": 512, "source": 4.0, "converted": 2.0, "speed_up": 2.0}]


def test_latencies_leave_out_times_below_zero():
    rows = [_timed("generate", name, 1, 8, -1.0, tokens_per_s=-9.0) for name in ("source", "converted")]
    assert plots.latencies(rows, "generate") == ([], [])


def test_latencies_of_one_side_have_no_speed_up():
    (picture,), table = plots.latencies([_timed("prefill", "converted", 1, 512, 5e3)], "prefill")
    assert "speed_up" not in table[0] and len(picture.panels) == 1 and "without a source" in picture.headline


def test_more_than_four_batches_are_several_pictures():
    shapes = [(batch, seqlen) for batch in range(1, 6) for seqlen in (512, 1024)]
    rows = [_timed("decode step", name, *shape, 1e3) for name in ("source", "converted") for shape in shapes]
    assert [picture.columns for picture in plots.latencies(rows, "decode step")[0]] == [4, 1]


def test_largest_batch_is_of_the_largest_batch_measured():
    rows = [
        _timed("generate", name, batch, seqlen, 1e3, tokens_per_s=1.0, largest_batch=int(speed * 1e5 / seqlen) - batch)
        for name, speed in (("converted", 8), ("source", 1))
        for batch in (8, 1)
        for seqlen in (4096, 1024)
    ]
    picture = plots.largest_batches(rows)
    assert _curves(picture.panels[0])["source"] == [(1024, 97 - 8), (4096, 24 - 8)]
    assert plots.largest_batches([{**row, "largest_batch": None} for row in rows]) is None
