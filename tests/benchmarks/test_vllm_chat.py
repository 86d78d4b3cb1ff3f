"""The log of conversion, server and chat, with small programs in their places."""

import os
import sys
from types import SimpleNamespace

import pytest

from benchmarks import vllm_chat

CONVERT = "import pathlib, sys; pathlib.Path(sys.argv[3]).mkdir(); print('wrote', pathlib.Path(sys.argv[3]).resolve())"
# A shell without job control starts what runs in the background with Ctrl-C ignored, and so what that starts.
SERVER = """
import http.server, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
class Answers(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
print("Resolved architecture: MHA2MLAForCausalLM", flush=True)
print("what nobody asked for", flush=True)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[-1])), Answers).serve_forever()
"""


class Client:
    def __init__(self, **_):
        said = SimpleNamespace(content="Paris.")
        usage = SimpleNamespace(model_dump=lambda **_: {"total_tokens": 3})
        whole = SimpleNamespace(choices=[SimpleNamespace(message=said)], usage=usage)
        parts = [SimpleNamespace(choices=[SimpleNamespace(delta=said)])] * 2
        create = lambda stream, **_: parts if stream else whole  # noqa: E731
        self.models = SimpleNamespace(list=lambda: [SimpleNamespace(id="source-mla")])
        self.chat = SimpleNamespace(completions=SimpleNamespace(create=create))


def test_the_log_has_commands_answers_and_no_paths(tmp_path, monkeypatch):
    (tmp_path / "fake_convert.py").write_text(CONVERT)
    (tmp_path / "fake_server.py").write_text(SERVER)
    (tmp_path / "source").mkdir()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(vllm_chat, "with_entry_point", lambda: None)
    monkeypatch.setattr(vllm_chat, "MODULES", {"mha2mla": "fake_convert", "vllm": "fake_server"})
    monkeypatch.setitem(sys.modules, "openai", SimpleNamespace(OpenAI=Client, __version__="0"))
    log, port = tmp_path / "log.txt", str(20000 + os.getpid() % 20000)
    assert vllm_chat.main([str(tmp_path / "source"), "--log", str(log), "--port", port, "--convert", ""]) == 0
    said = log.read_text()
    assert "$ mha2mla convert source source-mla\nwrote source-mla\n$ vllm serve source-mla" in said
    assert "assistant: Paris.\n" in said and "assistant: Paris.Paris.\n" in said
    assert said.endswith("of the server's log:\nResolved architecture: MHA2MLAForCausalLM\n")
    assert str(tmp_path) not in said

    (tmp_path / "fake_server.py").write_text("raise SystemExit(3)")
    with pytest.raises(RuntimeError, match="the server ended with 3"):
        vllm_chat.main([str(tmp_path / "source"), "--log", str(log), "--port", port])
    (tmp_path / "fake_convert.py").write_text("print('no'); raise SystemExit(2)")
    with pytest.raises(RuntimeError, match="ended with 2:\nno"):
        vllm_chat.main([str(tmp_path / "source"), "--log", str(log), "--port", port])
