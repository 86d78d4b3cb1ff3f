"""Conversions that are killed, interrupted, or run out of disk: what is left, and what comes of going on."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import mha2mla
from mha2mla.conversion.calibration import generated_text, windows
from mha2mla.conversion.destination import DestinationError, temporary_folder
from mha2mla.conversion.resume import ResumeError
from mha2mla.pipeline import ParityError, prepare, run, verify, write
from tests.conversion import tiny
from tests.conversion.tiny import SHORT
from tests.few import few
from tests.folders import flip_bit

LAYERS = 6
RECIPES = {"gradient steps": {"fit.steps": 12, "fit.tokens": 128}, "statistics of the source": {}}

# Forks a process per destination that it is told, since importing takes longer than converting; an empty line asks for
# the status of the last one, which until then keeps its process id.
SERVER = """
import json, os, sys
import matplotlib.backends.backend_agg, matplotlib.figure
import torch
import mha2mla, mha2mla.modeling, mha2mla.pipeline, mha2mla.environment
source, recipe = sys.argv[1], json.loads(sys.argv[2])
print(flush=True)
for line in sys.stdin:
    destination = line.strip()
    if not destination:
        print(os.waitpid(pid, 0)[1], flush=True)
        continue
    pid = os.fork()
    if pid == 0:
        try:
            mha2mla.convert(source, destination, recipe, evaluation_tokens=128, device="cpu", progress=False,
                            spill_bytes=1, max_shard_bytes=1 << 16)
        except BaseException as error:
            print(error, file=sys.stderr, flush=True)
            os._exit(1)
        os._exit(0)
    print(pid, flush=True)
"""


class Converter:
    """Runs conversions in processes that may be killed."""

    def __init__(self, source, recipe):
        self.process = subprocess.Popen(
            [sys.executable, "-c", SERVER, str(source), json.dumps({**SHORT, **recipe})],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(Path(mha2mla.__file__).parents[1])},
        )
        self.process.stdout.readline()

    def start(self, destination) -> int:
        """Process id of a conversion to ``destination``."""
        return self._ask(destination)

    def status(self) -> int:
        """Of the last conversion, when it has ended."""
        return self._ask("")

    def _ask(self, line) -> int:
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()
        return int(self.process.stdout.readline())

    def close(self):
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return tiny.checkpoint(tmp_path_factory.mktemp("source") / "tiny", num_hidden_layers=LAYERS)


@pytest.fixture(scope="module")
def whole(source, tmp_path_factory):
    """The weights of a conversion that nothing disturbed."""
    folder = tmp_path_factory.mktemp("whole") / "out"
    convert(source, folder)
    return weights(folder)


def weights(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*.safetensors*"))}


def finished(folder):
    return len(list((folder / ".out.mha2mla-tmp" / "work").glob("layer-*.safetensors")))


@pytest.mark.slow
@few("name", RECIPES, count=1)  # steps begin with the statistics
def test_a_conversion_that_is_killed_at_random_points_ends_bit_equal(name, source, tmp_path, seed):
    """A crash mid-write leaves half a checkpoint."""
    converter, draw, out = Converter(source, RECIPES[name]), random.Random(seed), tmp_path / "out"
    try:
        converter.start(tmp_path / "undisturbed")
        assert converter.status() == 0
        kept = []
        for kill in range(5):
            pid = converter.start(out)
            wanted, polls = draw.randint(1, LAYERS - 1) if kill else 0, draw.randrange(100)
            while polls and not out.exists():
                polls -= finished(tmp_path) >= wanted
                time.sleep(0.001)
            # A name is whole from the moment that it is there.
            if out.exists():
                assert weights(out) == weights(tmp_path / "undisturbed")
            os.kill(pid, signal.SIGKILL)
            converter.status()
            if not out.exists():
                kept.append(finished(tmp_path))
            else:
                break
        assert kept and kept == sorted(kept), "no kill hit a conversion, or a finished layer was lost"
        if not out.exists():
            converter.start(out)
            assert converter.status() == 0, kept
            assert json.loads((out / "conversion.json").read_text())["resumed_layers"] == kept[-1]
    finally:
        converter.close()
    assert weights(out) == weights(tmp_path / "undisturbed")
    assert not (tmp_path / ".out.mha2mla-tmp").exists()
    records = [json.loads((folder / "conversion.json").read_text()) for folder in (out, tmp_path / "undisturbed")]
    for rows in zip(*(record["rows"] for record in records), strict=True):
        one, two = ({key: value for key, value in row.items() if key != "seconds"} for row in rows)
        assert one == two


def convert(source, destination, stop_after=None, monkeypatch=None, **keys):
    """A conversion that is interrupted when it has put ``stop_after`` layers on disk."""
    recipe = {**SHORT, **keys.pop("recipe", {})}
    keys = {"evaluation_tokens": 128, "device": "cpu", "progress": False, **keys}
    if stop_after is None:
        return mha2mla.convert(source, destination, recipe, **keys)

    class Interrupted(run.FinishedLayers):
        def add(self, *arguments):
            super().add(*arguments)
            if len(self) == stop_after:
                raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(run, "FinishedLayers", Interrupted)
        mha2mla.convert(source, destination, recipe, **keys)
    return None


def test_an_interrupted_conversion_goes_on_and_says_so(source, whole, tmp_path, monkeypatch, capsys):
    convert(source, tmp_path / "out", 4, monkeypatch, progress=True)
    assert "the same command goes on from there" in capsys.readouterr().err
    assert finished(tmp_path) == 4 and not (tmp_path / "out").exists()
    report = convert(source, tmp_path / "out", progress=True)
    error = capsys.readouterr().err
    assert f"going on after 4 of {LAYERS} layers" in error
    assert report.resumed_layers == 4 and len(report.layers) == LAYERS
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert weights(tmp_path / "out") == whole


def stop(*arguments, **keys):
    raise KeyboardInterrupt


def repeated(*arguments, **keys):
    raise AssertionError("what was finished is done again")


def test_an_interrupt_before_anything_is_finished_leaves_nothing(source, tmp_path, monkeypatch):
    monkeypatch.setattr(windows, "text_shares", stop)
    with pytest.raises(KeyboardInterrupt):
        convert(source, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_text_and_searches_of_an_interrupted_run_are_not_repeated(tmp_path, monkeypatch):
    """Of a large model both take longer than some layers."""
    source = tiny.checkpoint(tmp_path / "source")
    recipe = {"layout": "shared", "calibration.text": "generated", "latent.ranks": "measured"}
    recipe["calibration.tokens"] = 256
    monkeypatch.setenv("MHA2MLA_CACHE", str(tmp_path / "cache"))
    whole = convert(source, tmp_path / "whole", recipe=recipe)
    monkeypatch.setenv("MHA2MLA_CACHE", str(tmp_path / "another cache"))
    stages = (  # one that is interrupted, and what is finished by then
        (prepare, "choose_layer_ranks", windows, "text_shares"),
        (run, "convert_layers", prepare, "choose_layer_ranks"),
    )
    for module, name, finished_in, finished_name in stages:
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(module, name, stop)
            convert(source, tmp_path / "out", recipe=recipe)
        monkeypatch.setattr(finished_in, finished_name, repeated)
    report = convert(source, tmp_path / "out", recipe=recipe)
    assert report.searches == whole.searches and report.resumed_layers == 0
    assert weights(tmp_path / "out") == weights(tmp_path / "whole")


def test_text_that_was_being_written_is_gone_on_with(source, tmp_path, monkeypatch, capsys):
    """The writing is the longest part of a conversion on a CPU."""
    recipe = {"calibration.text": "generated", "calibration.tokens": 512, "calibration.lengths": [32, 64]}
    monkeypatch.setattr(generated_text, "rows_at_once", lambda model, length: 3)
    written, write_rows, most = [], generated_text._write, 99

    def counted(*arguments):
        if len(written) == most:
            raise KeyboardInterrupt
        written.append(write_rows(*arguments))
        return written[-1]

    monkeypatch.setattr(generated_text, "_write", counted)
    monkeypatch.setenv("MHA2MLA_CACHE", str(tmp_path / "one"))
    convert(source, tmp_path / "whole", recipe=recipe)
    total = len(written)
    monkeypatch.setenv("MHA2MLA_CACHE", str(tmp_path / "two"))
    for batches in (1, total - 2):  # of the first run; of the second, behind that one
        most = batches
        written.clear()
        with pytest.raises(KeyboardInterrupt):
            convert(source, tmp_path / "out", recipe=recipe, progress=True)
        assert GOES_ON in capsys.readouterr().err
    written.clear()
    most = 99
    convert(source, tmp_path / "out", recipe=recipe, progress=True)
    assert "going on with calibration text" in capsys.readouterr().err
    assert total > 3 and len(written) == 1
    assert weights(tmp_path / "out") == weights(tmp_path / "whole")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "out", "two", "whole"]


def test_saved_text_is_not_used_for_another_text_of_the_same_name(source, tmp_path, monkeypatch):
    text = tmp_path / "text.txt"
    text.write_text("One text, which is long enough for some windows. " * 40)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(run, "convert_layers", stop)
        convert(source, tmp_path / "out", calibration=str(text))
    text.write_text("Another text, which is also long enough for windows. " * 40)
    convert(source, tmp_path / "out", calibration=str(text))
    convert(source, tmp_path / "whole", calibration=str(text))
    assert weights(tmp_path / "out") == weights(tmp_path / "whole")


GOES_ON = "work: the same command goes on from there"


class OutOfMemory(run.FinishedLayers):
    def add(self, *arguments):
        if len(self) == 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        super().add(*arguments)


def no_parity(*arguments, **keys):
    raise ParityError("predictions are far from the source's")


class FullDisk(write.ShardedWriter):
    def finish(self):
        raise DestinationError("No space left on device")


@pytest.mark.parametrize(
    ("place", "fault", "error", "kept", "again"),
    [
        ((run, "FinishedLayers"), OutOfMemory, torch.OutOfMemoryError, 3, GOES_ON),
        ((write, "ShardedWriter"), FullDisk, DestinationError, LAYERS, GOES_ON),
        ((verify, "compare"), stop, KeyboardInterrupt, LAYERS, GOES_ON),
        ((run, "verify"), no_parity, ParityError, LAYERS, "work: resume='never' (--resume never) begins anew"),
    ],
)
def test_an_error_keeps_finished_layers_as_a_kill_does(
    place, fault, error, kept, again, source, whole, tmp_path, monkeypatch, capsys
):
    with monkeypatch.context() as patch, pytest.raises(error):
        patch.setattr(*place, fault)
        convert(source, tmp_path / "out", progress=True)
    assert again in capsys.readouterr().err
    assert finished(tmp_path) == kept and not list((tmp_path / ".out.mha2mla-tmp").glob("*.safetensors"))
    assert convert(source, tmp_path / "out").resumed_layers == kept
    assert weights(tmp_path / "out") == whole


def test_what_goes_on_is_said_only_where_it_does(source, tmp_path, monkeypatch, capsys):
    """Not of layers that the same command refuses or discards, or that another process makes."""
    convert(source, tmp_path / "out", 2, monkeypatch, progress=True)
    assert GOES_ON in capsys.readouterr().err
    with pytest.raises(ResumeError):
        convert(source, tmp_path / "out", dtype=torch.bfloat16, progress=True)
    assert "goes on" not in capsys.readouterr().err
    convert(source, tmp_path / "out", 2, monkeypatch, progress=True, resume="never")
    assert "the same command without resume='never' (--resume never) goes on" in capsys.readouterr().err
    with (
        temporary_folder(tmp_path / "out", overwrite=False, worth_keeping=lambda work: True),
        pytest.raises(DestinationError, match="another process"),
    ):
        convert(source, tmp_path / "out", progress=True)
    assert "goes on" not in capsys.readouterr().err


def test_a_damaged_layer_is_made_anew_and_said_so(source, whole, tmp_path, monkeypatch, capsys):
    convert(source, tmp_path / "out", 4, monkeypatch)
    flip_bit(tmp_path / ".out.mha2mla-tmp" / "work" / "layer-00001.safetensors")
    assert convert(source, tmp_path / "out", progress=True).resumed_layers == 3
    assert "layer-00001.safetensors in" in capsys.readouterr().err
    assert weights(tmp_path / "out") == whole


def test_layers_of_other_code_or_another_device_are_not_used(source, tmp_path, monkeypatch):
    convert(source, tmp_path / "out", 2, monkeypatch)
    for part, found in (("code_hash", "code"), ("device_name", "device")):
        with monkeypatch.context() as patch, pytest.raises(ResumeError, match=rf"differs in {found}"):
            patch.setattr(prepare, part, lambda *arguments: "another")
            convert(source, tmp_path / "out")
        assert finished(tmp_path) == 2


def other_text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("Another text, which is long enough for some windows. " * 40)
    return {"calibration": str(path)}


CHANGES = {
    "recipe.calibration.seed": lambda path: {"recipe": {"calibration.seed": 1}},
    "recipe.layout": lambda path: {"recipe": {"layout": "per-group"}},
    "calibration": other_text,
    "compute_dtype": lambda path: {"compute_dtype": torch.float64},
    "dtype": lambda path: {"dtype": torch.bfloat16},
}


def test_another_conversion_does_not_go_on_from_the_layers_nor_lose_them(source, tmp_path, monkeypatch):
    convert(source, tmp_path / "out", 2, monkeypatch)
    for change, keys in CHANGES.items():
        with pytest.raises(ResumeError, match=rf"2 finished layers .* differs in .*{change}.*resume='never'"):
            convert(source, tmp_path / "out", **keys(tmp_path))
        assert finished(tmp_path) == 2
    report = convert(source, tmp_path / "out", resume="never", dtype=torch.bfloat16)
    assert report.resumed_layers == 0 and not list(tmp_path.glob(".*"))


def test_layers_of_a_changed_source_are_not_used_whatever_its_times_say(tmp_path, monkeypatch):
    source = tiny.checkpoint(tmp_path / "source")
    weight = source / "model.safetensors"
    os.utime(weight, ns=(1, 1))
    convert(source, tmp_path / "out", 1, monkeypatch)
    flip_bit(weight)
    os.utime(weight, ns=(1, 1))
    with pytest.raises(ResumeError, match="differs in source.model.safetensors"):
        convert(source, tmp_path / "out")
    flip_bit(weight)
    assert convert(source, tmp_path / "out").resumed_layers == 1


# In a mount namespace of its own: file systems of so many kB, what a conversion to each of them came to, and then, when
# there is room, how many layers it had kept.
FULL_DISKS = """
import json, os, subprocess, sys
import mha2mla
from pathlib import Path
source, place, recipe = sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3])
for size in map(int, sys.argv[4:]):
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}k", "tmpfs", place], check=True)
    def convert():
        return mha2mla.convert(source, place / "out", recipe, evaluation_tokens=128, device="cpu", progress=False,
                               spill_bytes=1, max_shard_bytes=1 << 16)
    error = kept = None
    try:
        convert()
    except (OSError, ValueError) as caught:
        error = str(caught)
    left = sorted(os.listdir(place))
    if error is not None:
        subprocess.run(["mount", "-o", "remount,size=8m", place], check=True)
        kept = convert().resumed_layers
    print(json.dumps([size, error, left, kept]), flush=True)
    subprocess.run(["umount", place], check=True)
"""


def may_mount(tmp_path):
    command = ["unshare", "-rm", "mount", "-t", "tmpfs", "tmpfs", str(tmp_path)]
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except OSError:
        return False


@pytest.mark.slow
def test_a_full_disk_is_named_and_costs_no_finished_layer(source, tmp_path):
    """Real file systems, from one that does not hold the first activations to one that holds everything."""
    if not may_mount(tmp_path):
        pytest.skip("no user namespaces on this machine, so no small file system to fill")
    sizes = [160, 320, 448, 704, 8192]
    done = subprocess.run(
        ["unshare", "-rm", sys.executable, "-c", FULL_DISKS, str(source), str(tmp_path), json.dumps(SHORT)]
        + [str(size) for size in sizes],
        env={**os.environ, "PYTHONPATH": str(Path(mha2mla.__file__).parents[1])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    outcomes = {size: outcome for size, *outcome in map(json.loads, done.stdout.splitlines())}
    assert list(outcomes) == sizes and outcomes.pop(8192) == [None, ["out"], None]
    for error, left, _ in outcomes.values():
        assert "No space left on device" in error and left in ([], [".out.mha2mla-tmp"])
    kept = [layers for _, _, layers in outcomes.values()]
    assert kept == sorted(kept) and kept[0] == 0 and kept[-1] > 0
    # The activations, a layer, a shard: each was the one that did not fit.
    for part in ("/activations", "work/.layer-", "shard-"):
        assert any(part in error for error, _, _ in outcomes.values()), outcomes
