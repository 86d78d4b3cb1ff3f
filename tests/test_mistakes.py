"""A mistake on the command line is one line that names it, soon, and exit code 2."""

import shutil
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest
import transformers

from mha2mla.checkpoints import find_checkpoint
from mha2mla.cli.verbs import main
from tests.commands import command, run
from tests.few import each


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "models are given by nothing"),
        (("a", "b", "--preset", "llama-2-7b-decode"), "models are given by SOURCE and CONVERTED, --preset"),
        (("a",), "CONVERTED is not given beside SOURCE 'a'"),
        (("--random-weights", "tiny", "--kv-lora-rank", "8"), "qk_rope_head_dim is not given"),
        (("--random-weights", "tiny", "--layers", "0"), "layers is 0; expected 1 or more"),
        (("a", "b", "--layout", "latent", "--layers", "2"), "--layout, --layers is given beside SOURCE and CONVERTED"),
        (("--preset", "llama-2-7b-decode", "--level", "e2e"), "--level is given beside --preset"),
        (("--preset", "llama-2-7b-decode", "--layer", "1", "--new-tokens", "8"), "--new-tokens, --layer is given bes"),
    ],
)
def test_latency_says_which_models_it_wants(arguments, message, capsys):
    assert run("eval", "latency", *arguments) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("convert /no/such/folder out", "source is '/no/such/folder'"),
        ("inspect /no/such/folder", "checkpoint is '/no/such/folder'"),
        ("inspect a --length 4096,0", "--length has 0; expected at least 1"),
        ("chat a --max-length 0", "max_length is 0; expected at least 1"),
        ("inspect a --batch 0", "--batch has 0; expected at least 1"),
        ("demo --model /no/such/folder", "model is '/no/such/folder'"),
        ("eval quality /no/such/a /no/such/b", "/no/such/a"),
        ("eval quality a b --text generated", "text 'generated' is made up by a model, for calibration; expected"),
        ("eval quality a b --text builtin:stdlib+builtin:prose", "is 2 texts joined by '+'; expected one: a file, "),
        ("eval quality a b --probes --probe-items 0", "--probe-items is 0; expected at least 1"),
        ("eval quality a b --probe-items 5", "--probe-items is 5; expected at least 1, beside --probes"),
        ("report no.json", "no.json"),
        ("convert a b --recipe /no/such.yaml", "recipe file /no/such.yaml is no file"),
        ("convert a b --cache-ratio 1.5", "cache_ratio is 1.5"),
        ("convert a b --preset fast", "preset is 'fast'; expected one of 'auto', 'minimal', "),
        ("convert a b --layout shraed", "'latent'; did you mean 'shared'?"),
        ("convert a b --ratio 0.5", "Unknown option: --ratio. Did you mean --cache-ratio?"),
        ("convrt --help", 'Unknown command "convrt". Did you mean "convert"?'),
        ("eval qualty -h", 'Unknown command "qualty". Did you mean "quality"?'),
        ("help convrt", 'Unknown command "convrt". Did you mean "convert"?'),
        ("convert a b --calibration.text nosuch.txt", ":COLUMN]]], generated or generated-diverse ("),
        ("convert a b --calibration.text nosuch.txt", "text 'nosuch.txt' is no file; expected a file, builtin:pydoc,"),
        ("convert a b --calibration.text builtin:opticks+builtin:stdlb", "did you mean 'builtin:stdlib'?"),
        ("convert a b --latent.ranks uneven", "latent.ranks is 'uneven'; expected 'uniform', 'measured' or a list of"),
        ("convert a b --dtype float8", 'Invalid value "float8" for --dtype. Choose from: "float32", "bfloat16", "flo'),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(argv, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = command(*argv.split())
    (line,) = done.stderr.splitlines()
    assert done.returncode == 2 and line.startswith("mha2mla: error: ") and message in line


@pytest.mark.parametrize("verb", ["convert", "chat"])
@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("llama.Q4_K_M.gguf", "config.json; llama.Q4_K_M.gguf is not read: expected the safetensors checkpoint"),
        ("adapter_config.json", "config.json; it holds an adapter: expected a whole checkpoint"),
        ("snapshots/1a2b/config.json", "config.json; expected a checkpoint; did you mean 'folder/snapshots/1a2b'?"),
    ],
)
def test_a_folder_without_config_says_what_it_is(verb, file, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (Path("folder") / file).parent.mkdir(parents=True)
    (Path("folder") / file).touch()
    assert run(verb, "folder", *["out"] * (verb == "convert")) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("verb", [["inspect"], ["export"], ["eval", "latency"]], ids=" ".join)
def test_an_unconverted_checkpoint_is_refused(verb, tiny_source, tmp_path):
    places = {"export": [tmp_path / "out"], "eval": [tiny_source]}.get(verb[0], [])
    done = command(*map(str, [*verb, tiny_source, *places]))
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    assert "has model_type 'llama'; expected 'mha2mla'" in done.stderr


@pytest.mark.parametrize("path", [None, 5, b"folder", ""])
def test_what_is_no_path_is_refused_by_name(path):
    with pytest.raises(ValueError, match=f"source is {path!r}; expected a folder or hub id"):
        find_checkpoint(path, "source")


CLASSES = ["AutoModel", pytest.param("AutoModelForSequenceClassification", marks=pytest.mark.exhaustive)]


@pytest.fixture(scope="module", params=CLASSES)
def headless(request, tiny_converted, tmp_path_factory):
    """Folder of the converted model without its lm_head, and the tokenizer."""
    folder = tmp_path_factory.mktemp("headless") / request.param
    getattr(transformers, request.param).from_pretrained(tiny_converted).save_pretrained(folder)
    for file in tiny_converted.glob("*token*"):
        shutil.copy(file, folder)
    return folder


def test_checkpoint_without_lm_head_is_refused(headless, tiny_source, tmp_path, capsys):
    """transformers puts a random head on it, with a warning."""
    for argv in (
        ("generate", headless, "--prompt", "a"),
        ("chat", headless),
        ("eval", "quality", tiny_source, headless, "--lengths", "32", "--max-tokens", "64"),
        ("eval", "latency", tiny_source, headless, "--level", "step", "--batch-sizes", "1", "--seqlens", "8"),
        ("convert", headless, tmp_path / "out", "--layout", "latent"),
        ("inspect", headless),
        ("export", headless, tmp_path / "out"),
    ):
        device = () if argv[0] in ("inspect", "export") else ("--device", "cpu")
        assert run(*argv, *device) == 2, argv
        assert f"tensor lm_head.weight is absent from {headless}" in capsys.readouterr().err, argv


@pytest.mark.parametrize("kind", ["quality", "tasks"])
def test_source_and_converted_the_wrong_way_round(kind, tiny_source, tiny_converted, capsys):
    assert run("eval", kind, tiny_converted, tiny_source) == 2
    assert "expected the source first" in capsys.readouterr().err


@pytest.mark.parametrize("argv", [["--debug", "inspect", "/no/such"], ["inspect", "/no/such", "--debug"]], ids=" ".join)
def test_debug_raises_before_or_behind_the_verb(argv):
    with pytest.raises(FileNotFoundError):
        main(argv)


class Refusal(BaseHTTPRequestHandler):
    """Notes which models its server is asked for, and answers that it is unavailable."""

    def do_GET(self) -> None:
        if self.path.startswith("/api/models/"):
            self.server.asked.append(self.path.removeprefix("/api/models/"))
        self.send_error(503)

    do_HEAD = do_GET


@pytest.fixture
def hub():
    with HTTPServer(("127.0.0.1", 0), Refusal) as server:
        server.asked = []
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


READING = "inspect {}, eval quality {} b, eval tasks {} b, eval latency {} b, demo --model {}, convert {} out, "
READING += "generate {} --prompt a, chat {}, export {} out"


@each("argv, path", READING.split(", "), ["modles/llama", "llama", "./modles/llama"])
def test_a_mistyped_path_asks_the_hub_once_at_most(argv, path, hub, tmp_path):
    where = {"HF_ENDPOINT": f"http://127.0.0.1:{hub.server_address[1]}", "HF_HOME": str(tmp_path)}
    done = command(*argv.format(path).split(), HF_HUB_OFFLINE="0", **where)
    assert done.returncode == 2 and hub.asked == ([] if path.startswith(".") else [path])
    assert len(done.stderr.splitlines()) == 1 and f"is {path!r}" in done.stderr


@pytest.mark.parametrize(("name", "message"), [("no.json", "no.json"), ("empty.jsonl", "empty.jsonl has no prompts")])
def test_a_file_is_missed_before_torch_is_imported(name, message, tiny_source, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("empty.jsonl").touch()
    done = command("generate", str(tiny_source), "--file", name)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1 and message in done.stderr


def test_a_hub_id_needs_no_owner(monkeypatch):
    """gpt2 is one. Where the network is, the hub is asked for it once; where the files are in its cache, not at all."""
    import huggingface_hub

    asked = []
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda self, name, **_: asked.append(name))
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *_: None)
    assert find_checkpoint("gpt2", "source") == "gpt2" and find_checkpoint("a/b", "source") == "a/b"
    assert asked == ["gpt2", "a/b"]
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *_: "config.json")
    assert find_checkpoint("gpt2", "source") == "gpt2" and len(asked) == 2
    monkeypatch.undo()
    with pytest.raises(FileNotFoundError, match="source is 'a b', which is no folder here and no hub id"):
        find_checkpoint("a b", "source")


@pytest.mark.parametrize("call", ["model_info", "auth_check"])
def test_a_gated_model_names_page_and_login(call, monkeypatch):
    """Without access the hub shows such a model, but none of its files."""
    import huggingface_hub
    from huggingface_hub.errors import GatedRepoError

    def refuse(self, name, **_):
        raise GatedRepoError("restricted", response=SimpleNamespace(headers={}, request=None))

    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *_: None)
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda self, name, **_: SimpleNamespace(gated="manual"))
    monkeypatch.setattr(huggingface_hub.HfApi, call, refuse)
    with pytest.raises(FileNotFoundError, match=r"gates it: accept its terms at https://\S+/a/llama, then log in"):
        find_checkpoint("a/llama", "source")


def test_messages_name_flags(tiny_source, tiny_converted, capsys):
    """--overwrite is for the shell, overwrite=True for Python."""
    assert run("convert", tiny_source, tiny_converted, "--device", "cpu") == 2
    error = capsys.readouterr().err
    assert "expected a new folder, or --overwrite" in error and "=True" not in error


@pytest.mark.parametrize(
    ("argv", "message", "verb"),
    [
        ("", "VERB is not given", ""),
        ("eval", "VERB is not given", " eval"),
        ("frobnicate", 'Unknown command "frobnicate" (mha2mla', ""),
        ("convrt a b", 'Unknown command "convrt". Did you mean "convert"?', ""),
        ("eval qualty a b", 'Unknown command "qualty". Did you mean "quality"?', " eval"),
        ("convert a", 'Command "convert" parameter DESTINATION requires an argument', " convert"),
        ("convert a b c", "Unused Tokens: ['c'] (", " convert"),
        (
            "convert a b --latent.ranks 8 16",
            "Unused Tokens: ['16']; numbers of a list are joined by commas",
            " convert",
        ),
        ("convert a b --layot shared", "Unknown option: --layot. Did you mean --layout?", " convert"),
        ("convert a b --latent.rul x", "Unknown option: --latent.rul. Did you mean --latent.rule?", " convert"),
        ("eval quality a b --speed 11", "Unknown option: --speed", " eval quality"),
        ("eval quality a b --text", "parameter --text requires", " eval quality"),
        ("eval latency a b --batch-sizes 1;8", "whole numbers joined by commas, such as 1,8", " eval latency"),
        ("eval latency a b --layer one", 'for --layer: unable to convert "one" into int', " eval latency"),
    ],
)
def test_wrong_word_names_verb_and_alternative(argv, message, verb, capsys):
    assert run(*argv.split()) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"mha2mla: error: {message}") or message in line
    assert line.endswith(f"(mha2mla{verb} --help lists what there is)")
