"""The whole way in one log: convert a checkpoint, serve it by vLLM's OpenAI server, chat through the OpenAI client.

    python benchmarks/vllm_chat.py path/to/SmolLM2-135M-Instruct --log docs/notes/vllm-chat.txt

Commands are run in an empty folder, with the source linked into it by its name, so the log has no paths of the machine.
Needs vLLM and openai (docs/serving.md); run from a clone.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.recording import command
from benchmarks.vllm_engine import with_entry_point
from mha2mla.environment import collect_environment, describe_environment

PROMPTS = ("What is the capital of France?", "And what is it known for? Answer in one sentence.")
# Lines of the server's log that say what it serves, and how.
TOLD = re.compile(
    r"Resolved architecture|Using \w+ attention|GPU KV cache size|Maximum concurrency|Graph capturing finished|"
    r"init engine|startup complete|POST /|ERROR"
)
MODULES = {"mha2mla": "mha2mla", "vllm": "vllm.entrypoints.cli.main"}
Say = Callable[[str], None]


def command_of(words: Sequence[str]) -> list[str]:
    """Command that runs ``mha2mla …`` or ``vllm …`` where only the modules lie on the path."""
    return [sys.executable, "-m", MODULES[words[0]], *words[1:]]


def run_conversion(words: Sequence[str], folder: Path, say: Say) -> None:
    """Raises RuntimeError with what it said, if the conversion failed."""
    say(f"$ {shlex.join(words)}")
    done = subprocess.run(command_of(words), cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{shlex.join(words)} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}")
    for line in done.stdout.rstrip().splitlines():
        say(line.rstrip().replace(f"{folder}/", ""))


def wait_for(server: subprocess.Popen, port: int, patience: float) -> float:
    """Seconds until the server answers.

    Raises:
        RuntimeError: it ended, or did not answer in ``patience`` seconds.
    """
    begin = time.time()
    while time.time() - begin < patience:
        if server.poll() is not None:
            raise RuntimeError(f"the server ended with {server.returncode}")
        try:
            with urlopen(f"http://127.0.0.1:{port}/health", timeout=2):
                return time.time() - begin
        except (URLError, OSError):
            time.sleep(0.5)
    raise RuntimeError(f"the server did not answer in {patience} s")


def chat(port: int, model: str, say: Say) -> None:
    """Two turns, through the OpenAI client; the second one streams."""
    from openai import OpenAI, __version__

    client = OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none")
    say(f"# openai {__version__}: client.models.list() -> {[each.id for each in client.models.list()]}")
    messages: list[dict[str, Any]] = []
    options: dict[str, Any] = {"model": model, "temperature": 0, "max_tokens": 96}
    for turn, prompt in enumerate(PROMPTS):
        messages.append({"role": "user", "content": prompt})
        say(f"# client.chat.completions.create({'stream=True, ' * turn}temperature=0, max_tokens=96, messages=…)")
        say(f"user: {prompt}")
        answer = client.chat.completions.create(messages=messages, stream=bool(turn), **options)
        if turn:
            text = "".join(part.choices[0].delta.content or "" for part in answer if part.choices)
        else:
            text = answer.choices[0].message.content
            say(f"# usage: {json.dumps(answer.usage.model_dump(exclude_none=True))}")
        say(f"assistant: {text}")
        messages.append({"role": "assistant", "content": text})


def run_server(words: Sequence[str], port: int, folder: Path, patience: float, say: Say) -> None:
    """Serves, chats, ends the server, and tells what it logged."""
    say(f"$ {shlex.join(words)} &")
    log = folder / "server.log"
    with log.open("w") as file:
        server = subprocess.Popen(
            command_of(words), cwd=folder, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        took = wait_for(server, port, patience)
        say(f"# answers after {took:.0f} s")
        chat(port, words[2], say)
    except BaseException:
        print(log.read_text()[-12000:], file=sys.stderr)
        raise
    finally:
        if server.poll() is None:
            os.killpg(server.pid, signal.SIGINT)
            try:
                server.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(server.pid, signal.SIGKILL)
    say("# of the server's log:")
    for line in log.read_text().splitlines():
        if TOLD.search(line):
            say(re.sub(r"\x1b\[\d*m", "", line).replace(f"{folder}/", ""))


def run(
    source: Path,
    *,
    log: Path,
    convert: str = "--preset quick --cache-ratio 0.5",
    serve: str = "",
    port: int = 8000,
    patience: float = 240.0,
) -> bool:
    """Converts, serves and chats.

    Args:
        source: folder of the source checkpoint.
        log: file that gets the log.
        convert: flags of mha2mla convert.
        serve: flags of vllm serve.
        port: of the server.
        patience: seconds for the server to come up.
    """
    with_entry_point()
    log.write_text("")

    def say(line: str) -> None:
        print(line, flush=True)
        with log.open("a") as file:
            file.write(line + "\n")

    say(f"# {describe_environment(collect_environment())}")
    with tempfile.TemporaryDirectory() as name:
        folder, model = Path(name), source.resolve().name
        (folder / model).symlink_to(source.resolve())
        run_conversion(["mha2mla", "convert", model, f"{model}-mla", *shlex.split(convert)], folder, say)
        options = [*shlex.split(serve), *(["--port", str(port)] if port != 8000 else [])]
        run_server(["vllm", "serve", f"{model}-mla", *options], port, folder, patience, say)
    return True


if __name__ == "__main__":
    sys.exit(command(run))
