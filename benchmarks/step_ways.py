"""Ways of a decode step of few rows, one change at a time, at commit 9f466d2: `python benchmarks/step_ways.py ROW JSON SECONDS`,
ROW 0 or 1 of step_timeline.ROWS. Its rows are benchmarks/results/h200-step-few-rows.json."""

# ruff: noqa
import sys, time, json, os, tempfile, importlib.util, pathlib, torch

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from dataclasses import replace
from benchmarks import step_timeline as s
from benchmarks.measuring import read_rate
from mha2mla.modeling.step import Ahead
from mha2mla.kernels.mixed_attention import absorbed
from mha2mla.kernels.skinny_linear import api, launch
from mha2mla.kernels.split_kv import launch as sk

row = int(sys.argv[1])
out = sys.argv[2]
MB = 2**20
t0 = time.time()


def patched(path, a, b):
    text = pathlib.Path(path).read_text()
    assert text.count(a) == 1
    file = tempfile.mkdtemp() + "/patched.py"
    pathlib.Path(file).write_text(text.replace(a, b))
    spec = importlib.util.spec_from_file_location("patched", file)
    mod = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(mod)
    return mod


combine_t = patched(
    "mha2mla/kernels/split_kv/combine.py",
    "                T.pdl_sync()\n",
    "                T.pdl_sync()\n                T.pdl_trigger()\n",
).make_combine
orig = dict(
    uk=absorbed.serves_maps, uv=absorbed.is_skinny, f=api.is_faster, c=launch.compile_skinny_linear, m=sk.make_combine
)
QKV, GU = (5120, 4096), (22016, 4096)


def setup(uk=True, uv=True, serve=(), stages=8, resident=2, trigger=False):
    absorbed.serves_maps = orig["uk"] if uk else (lambda *_: False)
    absorbed.is_skinny = orig["uv"] if uv else (lambda *_: False)
    api.is_faster = lambda o, c, n: (o, c) in serve or orig["f"](o, c, n)
    launch.compile_skinny_linear = lambda mm, **k: orig["c"](
        mm, **k, **(dict(stages=stages, resident=resident) if (k["outputs"], k["columns"]) in serve else {})
    )
    if (sk.make_combine is combine_t) != trigger:
        sk.make_combine = combine_t if trigger else orig["m"]
        sk.compile_merge.cache_clear()
        sk.compile_chosen.cache_clear()


A = Ahead
P = 2**16
V = [
    ("before", dict(uk=False, uv=False), ("o_proj", "down_proj"), A()),
    ("base", {}, (), A()),
    ("cuBLAS W_UK", dict(uk=False), (), A()),
    ("cuBLAS W_UV", dict(uv=False), (), A()),
    ("cuBLAS down", {}, ("down_proj",), A()),
    ("cuBLAS output", {}, ("o_proj",), A()),
    ("norm early", {}, (), A(norm=P)),
    ("norm 8", {}, (), A(norm=8 * MB)),
    ("norm 16", {}, (), A(norm=16 * MB)),
    ("norm 32", {}, (), A(norm=32 * MB)),
    ("append 8", {}, (), A(append=8 * MB)),
    ("append 16", {}, (), A(append=16 * MB)),
    ("append 32", {}, (), A(append=32 * MB)),
    ("activation 8", {}, (), A(activation=8 * MB)),
    ("activation 16", {}, (), A(activation=16 * MB)),
    ("all asked", {}, (), A(norm=16 * MB, append=32 * MB, activation=8 * MB)),
    ("combine triggers", dict(trigger=True), (), A()),
    ("qkv ours 8 2", dict(serve=(QKV,)), (), A()),
    ("qkv ours 4 3", dict(serve=(QKV,), stages=4, resident=3), (), A()),
    ("qkv ours 6 3", dict(serve=(QKV,), stages=6, resident=3), (), A()),
    ("gu ours 8 2", dict(serve=(GU,)), (), A()),
    ("gu ours 4 3", dict(serve=(GU,), stages=4, resident=3), (), A()),
    ("gu ours 6 3", dict(serve=(GU,), stages=6, resident=3), (), A()),
    ("both ours 4 3", dict(serve=(QKV, GU), stages=4, resident=3), (), A()),
    ("both ours 4 3, norm early", dict(serve=(QKV, GU), stages=4, resident=3), (), A(norm=P)),
    ("both ours 8 2, norm early", dict(serve=(QKV, GU)), (), A(norm=P)),
    (
        "both ours 4 3, norm early, append 32",
        dict(serve=(QKV, GU), stages=4, resident=3),
        (),
        A(norm=P, append=32 * MB),
    ),
    (
        "both ours 4 3, norm 16, append 32, trigger",
        dict(serve=(QKV, GU), stages=4, resident=3, trigger=True),
        (),
        A(norm=16 * MB, append=32 * MB),
    ),
    ("base again", {}, (), A()),
    ("before again", dict(uk=False, uv=False), ("o_proj", "down_proj"), A()),
]
with torch.no_grad():
    R = read_rate()
    dev = torch.device("cuda")
    model = s.build("per head 512+16", 32, False, dev, torch.bfloat16)
    print("built %.0f s" % (time.time() - t0), R, flush=True)
    batch, context = s.ROWS[row]
    cache = model.paged_cache(batch * -(-context // 64), 64)
    for ts in cache.tensors:
        for t in ts.values():
            t.normal_()
    torch.manual_seed(0)
    step, _ = s.prepared(cache, batch, context)
    ids = torch.randint(0, 32000, (batch,), device=dev)
    size = s.weight_bytes(model) + batch * context * model.config.cache_bytes_per_token(2)
    limit = size / R["R"] * 1e3
    setup(False, False)
    hooked = s.hooked(model)
    with hooked:
        first = model.forward_batch(ids, step).double()
    model.forward_batch(ids, step)
    rows = []
    for name, how, ends, ahead in V:
        if time.time() - t0 > float(sys.argv[3]):
            break
        try:
            setup(**how)
            same = replace(step, ahead=ahead)

            def run():
                same.refresh()
                return model.forward_batch(ids, same)

            with s.hooked(model, ends):
                logits = run().double()
                graph = s.captured(run)
            ms = s.replay_ms(graph, 0.25)
            tl = s.kernels_of(graph)
            r = dict(
                name=name,
                ms=ms,
                limit=limit,
                ratio=ms / limit,
                off=float((logits - first).norm() / first.norm()),
                **s.summary(tl, 32),
            )
            rows.append(r)
            del graph
            print(
                "%-45s %.3f ms %.3f x, off %.4f, %d kernels, %.0f s"
                % (name, ms, ms / limit, r["off"], r["kernels"], time.time() - t0),
                flush=True,
            )
            for k in r["layer"]:
                print("      %-60s %6.2f %6.2f" % (k["kernel"][:60], k["us"], k["gap_us"]))
        except Exception as e:
            print(name, "FAILED", repr(e)[:400], flush=True)
        json.dump(rows, open(out, "w"))
