"""Nothing is hidden in monkey-patches: classes of our own, registered, and others' left as they are."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]

# Runs in a process of its own: what was there before the import has to be seen before the import.
CODE = r"""
import functools, sys, types
import torch, transformers
from transformers import AutoModelForCausalLM, LlamaForCausalLM
import transformers.generation.utils, transformers.integrations, transformers.masking_utils
import transformers.models.llama.modeling_llama, transformers.modeling_utils, transformers.cache_utils
import torch.nn.functional

OTHERS = ("torch", "transformers")
PLAIN = (types.FunctionType, types.BuiltinFunctionType, type, property, classmethod, staticmethod, functools.partial)


def owners():
    # Modules of others, and the classes that are defined in them.
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] in OTHERS and isinstance(module, types.ModuleType):
            yield name, module
            for attribute, value in list(vars(module).items()):
                if isinstance(value, type) and getattr(value, "__module__", None) == name:
                    yield f"{name}.{attribute}", value


def snapshot():
    return {
        (owner, attribute): value
        for owner, holder in owners()
        for attribute, value in list(vars(holder).items())
        if isinstance(value, PLAIN)
    }


def code_of(value):
    while isinstance(value, (classmethod, staticmethod, functools.partial)):
        value = value.func if isinstance(value, functools.partial) else value.__func__
    if isinstance(value, property):
        return [code_of(part) for part in (value.fget, value.fset, value.fdel) if part is not None]
    if isinstance(value, type):
        return value.__module__
    return getattr(getattr(value, "__code__", None), "co_filename", getattr(value, "__module__", ""))


before = snapshot()
forward = LlamaForCausalLM.forward

import mha2mla

model = AutoModelForCausalLM.from_pretrained(sys.argv[1]).eval()
assert type(model).__module__ == "mha2mla.modeling.model"
ids = torch.arange(3, 9)[None]
model.generate(ids, max_new_tokens=3, do_sample=False, pad_token_id=0)
model.generate(ids, max_new_tokens=3, do_sample=False, pad_token_id=0, cache_implementation="static",
               disable_compile=True)
cache = model.paged_cache(num_pages=2)
batch = cache.extend({cache.open(): 6})
model.forward_batch(ids[0], cache.step(batch))


def patches():
    after = snapshot()
    changed = [key for key, value in before.items() if key in after and after[key] is not value]
    missing = [key for key in before if key not in after]
    ours = [key for key, value in after.items() if "mha2mla" in str(code_of(value))]
    return changed, missing, ours


changed, missing, ours = patches()
assert not changed, f"replaced: {changed[:20]}"
assert not missing, f"removed: {missing[:20]}"
assert not ours, f"added: {ours[:20]}"
# What is registered is registered by the doors that are there for it.
assert transformers.CONFIG_MAPPING["mha2mla"] is mha2mla.MHA2MLAConfig
assert AutoModelForCausalLM._model_mapping[mha2mla.MHA2MLAConfig] is mha2mla.MHA2MLAForCausalLM
# And a patch would have been seen, whatever it hangs on.
LlamaForCausalLM.forward = lambda *args, **keys: forward(*args, **keys)
transformers.cache_utils.Cache.latent = mha2mla.LatentCache.next_positions
del torch.nn.functional.linear
changed, missing, ours = patches()
assert changed == [("transformers.models.llama.modeling_llama.LlamaForCausalLM", "forward")], changed
assert ("torch.nn.functional", "linear") in missing and len(missing) == 1, missing
assert ours == [("transformers.cache_utils.Cache", "latent")], ours
"""


def test_importing_and_running_changes_no_class_of_torch_or_transformers(tiny_converted):
    command = [sys.executable, "-W", "ignore", "-c", CODE, str(tiny_converted)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
