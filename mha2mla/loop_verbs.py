"""The verbs of the command line that run models; as :mod:`mha2mla.verbs`."""

from __future__ import annotations

from typing import Any

from mha2mla.checkpoints import find_checkpoint
from mha2mla.files import output_file, report_file
from mha2mla.verbs import Device, Dtype, save


def generate(
    model: str,
    prompt: list[str] | None = None,
    file: str | None = None,
    output: str | None = None,
    chat: bool = False,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    seed: int = 0,
    max_sequences: int = 64,
    max_tokens: int = 2048,
    max_length: int | None = None,
    overwrite: bool = False,
    key_prefix: str = "",
    device: Device = None,
    dtype: Dtype | None = None,
    json: str | None = None,
) -> None:
    """Answers prompts with a converted or a source model, many at a time.

    What has an answer in the output already is not asked again; Ctrl-C keeps what is finished.

    Args:
        model: folder or hub id of a checkpoint, converted or not.
        prompt: one or several texts.
        file: JSON Lines with further prompts: objects with "prompt", or with "messages"; other keys go to the output.
        output: JSON Lines file that answers are added to; without it they are printed.
        chat: put prompts into the tokenizer's chat template, as messages always are.
        max_new_tokens: of an answer, at most.
        temperature: of the softmax; 0 takes the likeliest token.
        top_k: only the so many likeliest tokens; 0 takes all.
        top_p: only the likeliest tokens that together have this probability.
        min_p: only tokens at least so likely as this share of the likeliest.
        repetition_penalty: divides the logits of tokens that occurred.
        seed: of the first prompt; each further one has the next.
        max_sequences: prompts that run at a time.
        max_tokens: of a step, at least as many as max-sequences.
        max_length: tokens of a prompt with its answer; default what the model takes.
        overwrite: replace the answers in the output, of whatever model they are.
        key_prefix: put before the keys that an answer adds, where prompts have such keys.
        device: cpu, cuda, cuda:1, …; default CUDA when there is one.
        dtype: of the weights; default what the checkpoint has, but on CUDA bfloat16 for float32.
        json: also write what it took to this file.

    Example:
        mha2mla generate path/to/llama-mla --file prompts.jsonl --output answers.jsonl --max-new-tokens 64
    """
    from mha2mla.prompts import ANSWERS, Answers, checkpoint_digest, read_prompts

    answers_file = output_file(output, ANSWERS, model, file, name="output")
    record = report_file(json, "generate", model, file, output)
    if not (prompt or file):
        raise ValueError("--prompt and --file are not given; expected one of them")
    find_checkpoint(model, "model")
    tasks: list[dict[str, Any]] = [{"prompt": text} for text in prompt or ()] + (read_prompts(file) if file else [])
    given = {
        "max_new_tokens": max_new_tokens, "temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p,
        "repetition_penalty": repetition_penalty, "seed": seed,
    }  # fmt: skip
    from mha2mla.environment import device_name
    from mha2mla.loop import Loop, Sampling

    sampling = Sampling(**given)
    place, weights_dtype = _placement(model, device, dtype)
    made_by: dict[str, Any] = {"model": model, "sampling": given | {"chat": chat}}
    if answers_file is not None:
        made_by |= {"weights": checkpoint_digest(model), "dtype": None if weights_dtype is None else str(weights_dtype)}
        made_by |= {"device": device_name(place), "max_length": max_length}
    answers = Answers(answers_file, made_by, overwrite, key_prefix)
    left = len(answers.remaining(tasks))
    if not left:
        print(f"all {len(tasks)} prompts have answers in {output}")
        return
    from dataclasses import replace

    from mha2mla.eval.loading import load
    from mha2mla.loop.answering import answer_all, served, stop_tokens

    loaded, tokenizer = load(model, device=place, dtype=weights_dtype)
    sampling = replace(sampling, stop_tokens=stop_tokens(loaded, tokenizer))
    loop = Loop(served(loaded), max_sequences=max_sequences, max_tokens=max_tokens, max_length=max_length)
    for task, text in answer_all(loop, tokenizer, tasks, answers, sampling, chat=chat):
        if output is None:
            print(f"{task.get('prompt', '')}{text}\n", flush=True)
    answers.close()
    done, size = loop.progress, loop.cache_bytes_per_token
    print(
        f"{left} answers, {len(tasks) - left} found: {done.new_tokens:,} tokens in {done.seconds:.2f} s,"
        f" {done.tokens_per_second:,.0f} tokens/s; cache {size:,.0f} bytes a token, {loop.cache.nbytes:,} in all"
    )
    if record is not None:
        from mha2mla.environment import collect_environment

        row = vars(done) | {"tokens_per_second": done.tokens_per_second, "answers": left}
        row |= {"cache_bytes_per_token": size, "cache_bytes": loop.cache.nbytes}
        save(record, "generate", [row], model=model, sampling=given, environment=collect_environment())


def chat(
    model: str,
    beside: str | None = None,
    max_new_tokens: int = 256,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int = 0,
    max_length: int = 4096,
    device: Device = None,
    dtype: Dtype | None = None,
) -> None:
    """Talks with a model, or with two of them side by side; an empty line ends it, /new begins anew.

    Under each answer stand its tokens per second and what it has in the cache.

    Args:
        model: folder or hub id of a checkpoint, converted or not.
        beside: another one, such as the source, that answers the same.
        max_new_tokens: of an answer, at most.
        temperature: of the softmax; 0 takes the likeliest token.
        top_p: only the likeliest tokens that together have this probability.
        seed: of random answers.
        max_length: tokens of a conversation.
        device: cpu, cuda, cuda:1, …; default CUDA when there is one.
        dtype: of the weights; default what the checkpoint has, but on CUDA bfloat16 for float32.

    Example:
        mha2mla chat path/to/llama-mla --beside path/to/llama
    """
    names = {"model": model} | ({} if beside is None else {"beside": beside})
    for name, checkpoint in names.items():
        find_checkpoint(checkpoint, name)
    from mha2mla.eval.loading import load
    from mha2mla.loop import Sampling
    from mha2mla.loop.answering import Conversation

    sampling = Sampling(max_new_tokens, temperature, top_p=top_p, seed=seed)
    talks = {}
    for checkpoint in names.values():
        place, weights_dtype = _placement(checkpoint, device, dtype)
        loaded, tokenizer = load(checkpoint, device=place, dtype=weights_dtype)
        most = min(max_length, loaded.config.max_position_embeddings)
        # room for two conversations: one that runs, one that is remembered
        talks[checkpoint] = Conversation(loaded, tokenizer, sampling, max_length=most, num_pages=2 * -(-most // 64))
    while text := _line():
        for checkpoint, talk in talks.items():
            if text == "/new":
                talk.clear()
                continue
            if len(talks) > 1:
                print(f"{checkpoint}:")
            try:
                for piece in talk.say(text):
                    print(piece, end="", flush=True)
            except ValueError as error:
                print(f"{error} (/new begins anew)")
                continue
            print(f"\n{talk.last}\n", flush=True)


def _line() -> str:
    """What somebody types; nothing at the end of the input."""
    try:
        return input("> ").strip()
    except EOFError:
        print()
        return ""


def _placement(checkpoint: str, device: Device, dtype: Dtype | None) -> tuple[Any, Any]:
    """torch's device and dtype that a model is loaded with; the dtype None: the checkpoint's."""
    import torch

    from mha2mla.environment import compute_device

    place = compute_device(device)
    return place, getattr(torch, dtype) if dtype else kernels_dtype(checkpoint, place)


def kernels_dtype(checkpoint: str, device: Any) -> Any:
    """bfloat16 for a float32 checkpoint on a CUDA device; None: as it is."""
    import torch

    from mha2mla.eval.loading import load_config

    if device.type != "cuda":
        return None
    config = load_config(checkpoint, "model").get_text_config()
    return torch.bfloat16 if config.dtype == torch.float32 else None
