"""The faults that ``benchmarks/mutations.py`` puts into the code, one at a time, and the tests that must notice.

Each is a mistake that somebody made, or nearly made, here or in a similar project. A snippet occurs exactly once in its
file (``tests/benchmarks/test_mutations.py``): whoever changes that line gives the fault its new form.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """One deliberate fault.

    Attributes:
        name: what goes wrong.
        file: that is changed.
        right: the snippet that is replaced; occurs once in the file.
        wrong: what it is replaced by.
        tests: pytest's arguments: files or node ids, of which at least one must fail.
        only: pytest's ``-k``, where the files are long.
    """

    name: str
    file: str
    right: str
    wrong: str
    tests: tuple[str, ...]
    only: str = ""


KERNELS, MODELING, CONVERSION, EVAL = "mha2mla/kernels", "mha2mla/modeling", "mha2mla/conversion", "mha2mla/eval"
KERNEL_TESTING, THE_LOOP = "mha2mla/kernel_testing", "mha2mla/loop"

CACHES = (
    Fault(
        "what a static cache held before a reset or a crop is read",
        f"{MODELING}/latent_layer.py",
        "return torch.where(there, latent, 0.0), None if rope",
        "return latent, None if rope",
        (
            "tests/modeling/test_cache.py",
            "tests/modeling/test_cache_contents.py",
            "tests/modeling/test_cache_errors.py",
        ),
    ),
    Fault(
        "positions are read on the host",
        f"{MODELING}/cache.py",
        "(torch.arange(new_tokens, device=device) + self.get_seq_length())",
        "(torch.arange(new_tokens, device=device) + int(self.get_seq_length()))",
        ("tests/modeling/test_host_syncs.py",),
    ),
    Fault(
        "a full static cache writes over its neighbour",
        f"{MODELING}/latent_layer.py",
        "inside = token < self.capacity",
        "inside = token <= self.capacity",
        ("tests/modeling/test_cache.py", "tests/modeling/test_cache_contents.py"),
    ),
    Fault(
        "beams keep each other's tokens",
        f"{MODELING}/latent_layer.py",
        "rows = [rows[indices] for rows in self.rows()]",
        "rows = [rows[indices.sort().values] for rows in self.rows()]",
        ("tests/modeling/test_cache.py", "tests/modeling/test_cache_contents.py"),
    ),
    Fault(
        "a fork does not own its pages",
        f"{MODELING}/pages.py",
        "for page in self._pages[twin]:\n            if page != NO_PAGE:",
        "for page in self._pages[twin][1:]:\n            if page != NO_PAGE:",
        ("tests/modeling/test_pages.py",),
    ),
    Fault(
        "a shared page is free while somebody owns it",
        f"{MODELING}/pages.py",
        "if not self._owners[page]:\n            self._free.append(page)",
        "if self._owners[page] < 2:\n            self._free.append(page)",
        ("tests/modeling/test_pages.py",),
    ),
    Fault(
        "a cropped sequence keeps its last page",
        f"{MODELING}/pages.py",
        "mine, kept = self._pages[sequence], self._pages_for(length)",
        "mine, kept = self._pages[sequence], self._pages_for(length + 1)",
        ("tests/modeling/test_pages.py",),
    ),
    Fault(
        "padding rows of a batch write to page 0",
        f"{KERNELS}/rope_append/api.py",
        "known = (sequences >= 0) & (positions >= 0) & (page < max_pages)",
        "known = (positions >= 0) & (page < max_pages)",
        ("tests/kernels/rope_append/test_rope_append.py",),
        "not gpu",
    ),
    Fault(
        "slots are multiplied in 32 bits",
        f"{KERNELS}/rope_append/api.py",
        "slot = entry.long() * page_size + positions % page_size",
        "slot = entry * page_size + positions % page_size",
        ("tests/kernels/rope_append/test_rope_append.py", "tests/modeling/test_pages.py"),
    ),
    Fault(
        "the last token of a row is its next row's first",
        f"{MODELING}/batch.py",
        "return (self.cu_seqlens_q[1:].long() - 1).clamp_min(0)",
        "return self.cu_seqlens_q[1:].long().clamp_max(self.num_tokens - 1)",
        ("tests/modeling/test_batch.py", "tests/modeling/test_paged_batches.py"),
    ),
    Fault(
        "outputs come back in the order of the rows",
        f"{MODELING}/batch.py",
        "return [mine[index] for index in range(len(mine))]",
        "return list(mine.values())",
        ("tests/modeling/test_batch.py",),
    ),
)

MODEL = (
    Fault(
        "plans outlive the pages that they were made for",
        f"{MODELING}/cache.py",
        "if self.plans_for != pages:",
        "if self.plans_for is None:",
        ("tests/modeling/test_decode_step.py",),
    ),
    Fault(
        "layers of other windows share a schedule",
        f"{MODELING}/step.py",
        "same_schedule = (plan.num_ctas, limits, table.device)",
        "same_schedule = (plan.num_ctas, table.device)",
        ("tests/modeling/test_decode_step.py",),
    ),
    Fault(
        "attention sinks are counted from the padding",
        f"{MODELING}/visibility.py",
        "(token < first + sinks)",
        "(token < sinks)",
        ("tests/modeling/test_attention_window.py",),
    ),
    Fault(
        "a page is given back whose last token the next one sees",
        f"{MODELING}/paged_cache.py",
        "self.allocator.give_back(sequence, sinks, length + 1 - window)",
        "self.allocator.give_back(sequence, sinks, length + 2 - window)",
        ("tests/modeling/test_attention_window.py",),
    ),
    Fault(
        "long queries under a window leave out the first token of the first one's",
        f"{KERNELS}/mixed_attention/layout.py",
        "cached_length + 1 - window - (first + sinks)",
        "cached_length + 2 - window - (first + sinks)",
        ("tests/kernels/mixed_attention/test_mixed_attention.py",),
        "window",
    ),
    Fault(
        "eight new tokens are expanded",
        f"{MODELING}/latent_layer.py",
        "if query_length <= MAX_DECODE_QUERY_LENGTH:",
        "if query_length < MAX_DECODE_QUERY_LENGTH:",
        ("tests/modeling/test_forms.py",),
    ),
    Fault(
        "a refusal on a GPU is served by plain torch",
        f"{MODELING}/served.py",
        'if name is None and (backend is None or (device.type == "cuda" and not backend.compiled)):',
        "if name is None and backend is None:",
        ("tests/modeling/test_forms.py", "tests/modeling/test_served.py"),
    ),
    Fault(
        "paged_cache takes plain torch on CUDA without a word",
        f"{MODELING}/served.py",
        'if layer.batch_reason and layer.device.type == "cuda"',
        'if layer.batch_reason and layer.device.type == "cpu"',
        ("tests/modeling/test_served.py",),
    ),
    Fault(
        "a backend that is asked for by name leaves prompts to others",
        f"{MODELING}/latent_layer.py",
        "return LayerBackend(backend, layout, (name is not None or self._wants_prompts) and long_queries)",
        "return LayerBackend(backend, layout, False)",
        ("tests/modeling/test_forms.py",),
    ),
    Fault(
        "8-bit latents are expanded without their scales",
        f"{MODELING}/latent_layer.py",
        'latent = dequantize_latent(latent, stored["latent_scale"], self.dtype)',
        "latent = latent.to(self.dtype)",
        ("tests/modeling/test_forms.py",),
    ),
    Fault(
        "angles are counted in bfloat16",
        f"{MODELING}/rope.py",
        "angle = position_ids[..., None, None].to(torch.float32) * inv_freq.to(torch.float32)",
        "angle = position_ids[..., None, None].to(dtype) * inv_freq.to(dtype)",
        ("tests/modeling/test_checkpoint.py", "tests/modeling/test_forms.py"),
    ),
    Fault(
        "YaRN's factor is put on dims that do not rotate",
        f"{MODELING}/rope.py",
        "factor = torch.where(inv_freq == 0, torch.ones_like(inv_freq), scaling)",
        "factor = scaling",
        ("tests/test_families.py",),
        "smollm3 or glm or olmo3 or partial",
    ),
    Fault(
        "left padding is attended to in the absorbed form",
        f"{MODELING}/latent_layer.py",
        "None if starts is None else starts.to(self.device),",
        "None,",
        ("tests/modeling/test_forms.py", "tests/modeling/test_host_syncs.py"),
    ),
    Fault(
        "batches are attended without their windows",
        f"{MODELING}/backends.py",
        "dtype=dtype,\n        cache_starts=batch.cache_starts,\n        window=constants.window,",
        "dtype=dtype,\n        cache_starts=batch.cache_starts,\n        window=None,",
        ("tests/modeling/test_paged_batches.py",),
    ),
)

OPS = (
    Fault(
        "partials are kept in bfloat16",
        f"{KERNELS}/split_kv/plan.py",
        "partial_out=torch.empty(num_ctas, 2, *shape[1:], dtype=torch.float32, device=device)",
        "partial_out=torch.empty(num_ctas, 2, *shape[1:], dtype=torch.bfloat16, device=device)",
        ("tests/kernels/split_kv/test_partials.py", "tests/kernels/mla_decode/test_mla_decode.py"),
        "plan or partial or workspace",
    ),
    Fault(
        "causality is aligned to the top left",
        f"{KERNELS}/split_kv/reference.py",
        "limit = limit - (seqlen_q - 1) + torch.arange(seqlen_q, device=token.device)",
        "limit = torch.arange(seqlen_q, device=token.device) + 1 + 0 * limit",
        ("tests/kernel_testing/test_problems.py",),
    ),
    Fault(
        "a window is one token too long",
        f"{KERNELS}/split_kv/reference.py",
        "(token >= limit[..., None] - window)",
        "(token >= limit[..., None] - window - 1)",
        ("tests/kernel_testing/test_problems.py",),
    ),
    Fault(
        "NaN in a page that nobody reads reaches the output",
        f"{KERNELS}/mla_decode/reference.py",
        "latent = torch.where(used[..., None], latent_cache[page, row].to(dtype), 0)\n    k_pe",
        "latent = latent_cache[page, row].to(dtype)\n    k_pe",
        ("tests/kernel_testing/test_problems.py",),
    ),
    Fault(
        "weights lose digits to the log-sum-exp's rounding",
        f"{KERNELS}/split_kv/reference.py",
        "torch.softmax(score, dim=-1))",
        "torch.exp(score.float() - lse.half().float()[..., None]).to(score))",
        ("tests/kernel_testing/test_problems.py", "tests/kernel_testing/test_judgement.py"),
    ),
    Fault(
        "a partial without weight may make the merge NaN",
        f"{KERNELS}/attention_combine/reference.py",
        "part = torch.where(weight > 0, partial_out.to(arithmetic), 0)",
        "part = partial_out.to(arithmetic)",
        ("tests/kernels/attention_combine/test_attention_combine.py",),
    ),
    Fault(
        "the merge's log-sum-exp is to base 2",
        f"{KERNELS}/attention_combine/reference.py",
        "return (weight * part).sum(0).to(dtype or partial_out.dtype), total",
        "return (weight * part).sum(0).to(dtype or partial_out.dtype), total * 1.442695040888963",
        ("tests/kernels/attention_combine/test_attention_combine.py",),
    ),
    Fault(
        "pairs are turned the wrong way",
        f"{KERNELS}/rope_append/reference.py",
        "turned = first * cos - second * sin, second * cos + first * sin",
        "turned = first * cos + second * sin, second * cos - first * sin",
        ("tests/kernels/rope_append/test_rope_append.py",),
    ),
    Fault(
        "tokens without a slot are written",
        f"{KERNELS}/rope_append/reference.py",
        "valid = (slots >= 0) & (slots < capacity)",
        "valid = slots < capacity",
        ("tests/kernels/rope_append/test_rope_append.py",),
    ),
    Fault(
        "an infinite latent is stored as a number",
        f"{KERNELS}/mla_decode/quantization.py",
        "scale = torch.where(largest.isfinite(), scale, torch.nan)",
        "scale = torch.where(largest.isnan(), torch.nan, scale.clamp_max(1e30))",
        ("tests/kernels/mla_decode/test_mla_decode_fp8.py",),
        "finite",
    ),
    Fault(
        "rotary keys wider than shared memory are accepted",
        f"{KERNELS}/mla_decode/selection.py",
        "rope_width <= MAX_ROPE_WIDTH,",
        "rope_width > 0,",
        ("tests/modeling/test_served.py",),
    ),
    Fault(
        "a limit is raised and the documentation is not",
        f"{KERNELS}/mla_decode/selection.py",
        "MAX_LATENT = 1024",
        "MAX_LATENT = 1088",
        ("tests/test_limits.py",),
    ),
    Fault(
        "the last rotary columns of a tile are neither CTA's",
        f"{KERNELS}/mla_decode/halves.py",
        "-(-(tiling.groups_per_tile * qk_rope_head_dim) // (8 * CLUSTER)) * 8",
        "max(8, tiling.groups_per_tile * qk_rope_head_dim // (8 * CLUSTER) * 8)",
        ("tests/kernels/mla_decode/test_halves.py",),
    ),
    Fault(
        "32 heads take another kernel than 16 and 64",
        f"{KERNELS}/mla_decode/selection.py",
        "def list_kernels(shape: DecodeShape, capability: int) -> list[KernelChoice]:",
        "def list_kernels(shape: DecodeShape, capability: int) -> list[KernelChoice]:\n"
        "    capability = 80 if shape.heads == 32 else capability",
        (
            "tests/kernels/split_kv/test_tuning.py",
            "tests/kernels/mla_decode/test_mla_decode.py",
            "tests/benchmarks/test_decode_benchmark.py",
        ),
        "not compile",
    ),
    Fault(
        "importing the package patches transformers",
        "mha2mla/__init__.py",
        "from __future__ import annotations\n",
        "from __future__ import annotations\n\nimport transformers.models.llama.modeling_llama as _llama\n\n"
        "_llama.LlamaAttention.forward = lambda self, *args, **keys: (args[0], None)\n",
        ("tests/test_no_patching.py",),
    ),
)

LAYERS = (
    Fault(
        "the value bias is lost",
        f"{CONVERSION}/layer.py",
        "offset = offset + weights.v_bias.view(kv_heads, d).repeat_interleave(spec.group_size, 0)",
        "offset = offset + 0 * weights.v_bias.view(kv_heads, d).repeat_interleave(spec.group_size, 0)",
        ("tests/conversion/test_layer.py",),
    ),
    Fault(
        "the value bias is folded in another order of heads",
        f"{CONVERSION}/layer.py",
        "weights.v_bias.view(kv_heads, d).repeat_interleave(spec.group_size, 0)",
        "weights.v_bias.view(kv_heads, d).repeat(spec.group_size, 1)",
        ("tests/conversion/test_layer.py",),
    ),
    Fault(
        "the mean phase is on the wrong side",
        f"{CONVERSION}/rope/basis.py",
        "query_nope.append(real_map(identity[rest[a]] * phase[h]))",
        "query_nope.append(real_map(identity[rest[a]] * phase[h].conj()))",
        ("tests/conversion/test_layer.py",),
    ),
    Fault(
        "shared queries are not conjugated",
        f"{CONVERSION}/rope/basis.py",
        "query_rope = real_map(components.decode.mH)",
        "query_rope = real_map(components.decode.mT)",
        ("tests/conversion/test_layer.py",),
    ),
    Fault(
        "a dim is kept without its partner",
        f"{CONVERSION}/rope/basis.py",
        "return torch.cat([torch.cat([real, -imag], -1), torch.cat([imag, real], -1)], -2)",
        "return torch.cat([torch.cat([real, imag], -1), torch.cat([imag, real], -1)], -2)",
        ("tests/conversion/test_layer.py",),
    ),
    Fault(
        "the least important pairs are kept",
        f"{CONVERSION}/rope/rules.py",
        "scores.sort(dim=0, descending=True, stable=True).indices[: problem.pairs]",
        "scores.sort(dim=0, descending=False, stable=True).indices[: problem.pairs]",
        ("tests/conversion/test_layer.py",),
    ),
    Fault(
        "the covariance is not centred",
        f"{CONVERSION}/calibration/statistics.py",
        "covariance = self._outer / self.tokens - torch.outer(mean, mean)",
        "covariance = self._outer / self.tokens",
        (
            "tests/conversion/latent/test_rules.py",
            "tests/conversion/test_layer.py",
            "tests/conversion/test_layer_walk.py",
        ),
    ),
    Fault(
        "keys of the latent are weighted by the inverse",
        f"{CONVERSION}/latent/rules.py",
        "key_part = key_inverse @ decoder[:rows]",
        "key_part = key_root @ decoder[:rows]",
        ("tests/conversion/latent/test_rules.py",),
    ),
    Fault(
        "the smallest components are kept",
        f"{CONVERSION}/latent/rules.py",
        "vectors, scale = vectors.flip(1)[:, :rank], _scale(energy, rank)",
        "vectors, scale = vectors[:, :rank], _scale(energy, rank)",
        ("tests/conversion/latent/test_rules.py",),
    ),
    Fault(
        "KL is taken the other way round",
        "mha2mla/predictions.py",
        "kl_div(log_q, log_p,",
        "kl_div(log_p, log_q,",
        ("tests/test_pipeline.py",),
        "what_the_models_say",
    ),
)

RUNS = (
    Fault(
        "NaN passes the proof of full rank",
        "mha2mla/pipeline/verify.py",
        "if not parity.logits_relative_error <= tolerance:",
        "if parity.logits_relative_error > tolerance:",
        ("tests/test_pipeline.py",),
        "full_rank",
    ),
    Fault(
        "the names that were written are not compared",
        "mha2mla/pipeline/verify.py",
        "if reader.names() != written.expected_names():",
        "if not reader.names():",
        ("tests/test_pipeline.py",),
        "name or tensor or written",
    ),
    Fault(
        "a geometry that no kernel serves is converted without a word",
        "mha2mla/pipeline/report.py",
        "slow = [layer for layer in layers if not layer.compiled]",
        "slow = [layer for layer in layers if layer.compiled]",
        ("tests/test_pipeline.py",),
        "kernel",
    ),
    Fault(
        "resuming does not ask for the code",
        "mha2mla/pipeline/prepare.py",
        '"code": code_hash(),',
        '"code": "",',
        ("tests/test_resume.py", "tests/conversion/test_resume.py"),
        "code or device or fingerprint or request or another or differ",
    ),
    Fault(
        "resuming does not ask for the device",
        "mha2mla/pipeline/prepare.py",
        '"device": _device_name(plan.model.device),',
        '"device": "",',
        ("tests/test_resume.py", "tests/conversion/test_resume.py"),
        "code or device or fingerprint or request or another or differ",
    ),
    Fault(
        "layers of another conversion are taken",
        f"{CONVERSION}/resume.py",
        "same = theirs == json.loads(self._text)",
        "same = bool(theirs)",
        ("tests/conversion/test_resume.py",),
    ),
    Fault(
        "a checkpoint is not on the disk when it has its name",
        f"{CONVERSION}/result/writer.py",
        "        os.fsync(handle)",
        "        os.fstat(handle)",
        ("tests/conversion/result/test_writer.py",),
    ),
    Fault(
        "the old folder is deleted before the new one is there",
        f"{CONVERSION}/result/destination.py",
        "            final.rename(old)\n        temporary.rename(final)",
        "            remove(final)\n        temporary.rename(final)",
        ("tests/conversion/result/test_destination.py",),
    ),
    Fault(
        "a tensor with NaN is written",
        f"{CONVERSION}/result/writer.py",
        "if tensor.is_floating_point() and not torch.isfinite(tensor).all():",
        "if tensor.is_floating_point() and torch.isinf(tensor).any():",
        ("tests/conversion/result/test_writer.py",),
    ),
    Fault(
        "the index names the wrong file",
        f"{CONVERSION}/result/writer.py",
        "weight_map |= dict.fromkeys(names, final)",
        "weight_map |= dict.fromkeys(names[:-1] or names, final)",
        ("tests/conversion/result/test_writer.py",),
    ),
)

JUDGES = (
    Fault(
        "the judge allows ten times torch's error",
        f"{KERNEL_TESTING}/judgement.py",
        "ERROR_FACTOR = 2.0",
        "ERROR_FACTOR = 10.0",
        ("tests/kernel_testing/test_judgement.py",),
    ),
    Fault(
        "one far number is not seen",
        f"{KERNEL_TESTING}/judgement.py",
        "elif not largest <= highest:",
        "elif not largest <= 1e3 * highest:",
        ("tests/kernel_testing/test_judgement.py",),
    ),
    Fault(
        "NaN is not seen by the judge",
        f"{KERNEL_TESTING}/judgement.py",
        "if not (torch.equal(out.isnan(), expected.isnan()) and torch.equal(out.isinf(), expected.isinf())):",
        "if not torch.equal(out.isinf(), expected.isinf()):",
        ("tests/kernel_testing/test_judgement.py", "tests/kernel_testing/test_problems.py"),
    ),
    Fault(
        "rounding is expected to be a thousand times what it is",
        f"{KERNEL_TESTING}/textbook.py",
        "UNIT = torch.finfo(torch.float32).eps / 2",
        "UNIT = torch.finfo(torch.float32).eps * 500",
        ("tests/kernel_testing/test_judgement.py",),
    ),
    Fault(
        "what is wrong gets a time",
        f"{EVAL}/measurement.py",
        'return row | {"status": f"{WRONG}{check.reason}"}',
        'row["status"] = f"{WRONG}{check.reason}"',
        ("tests/eval/test_latency.py",),
    ),
    Fault(
        "a wrong row ends with exit code 0",
        f"{EVAL}/measurement.py",
        'return [row for row in rows if row["status"].startswith(WRONG)]',
        'return [row for row in rows if row["status"] == WRONG]',
        ("tests/test_cli.py",),
        "wrong",
    ),
    Fault(
        "what nobody may see is not poisoned",
        f"{KERNEL_TESTING}/problems.py",
        "buffer.masked_fill_(hidden[..., None], torch.nan)",
        "buffer.masked_fill_(hidden[..., None], 0)",
        ("tests/kernel_testing/test_problems.py",),
    ),
)

LOOP = (
    Fault(
        "all that the owner of a beginning has is taken for the beginning",
        f"{THE_LOOP}/scheduler.py",
        "                self.allocator.truncate(sequence, shared)\n",
        "",
        ("tests/loop/test_scheduler.py",),
    ),
    Fault(
        "all of a prompt is found in the cache, and no token is left to choose the next one by",
        f"{THE_LOOP}/prefixes.py",
        "range(0, len(tokens) - self.page_size, self.page_size)",
        "range(0, len(tokens) - self.page_size + 1, self.page_size)",
        ("tests/loop/test_scheduler.py",),
    ),
    Fault(
        "a request loses its pages before those that nobody runs are forgotten",
        f"{THE_LOOP}/scheduler.py",
        "            if not self._forget_ended():\n                last",
        "            if True:\n                last",
        ("tests/loop/test_scheduler.py",),
    ),
    Fault(
        "freed pages stay among the beginnings that may be shared",
        f"{THE_LOOP}/scheduler.py",
        "            self._prefixes.remove(sequence)",
        "            pass",
        ("tests/loop/test_scheduler.py",),
    ),
    Fault(
        "a token that came behind the end is part of the answer",
        f"{THE_LOOP}/request.py",
        "        if self.finished is not None:\n            return\n",
        "",
        ("tests/loop/test_scheduler.py",),
    ),
    Fault(
        "a token is drawn by its row's number in the batch",
        f"{THE_LOOP}/sampler.py",
        "[[row.seed, position] for row, position in zip(rows, positions, strict=True)]",
        "[[row.seed, position] for position, row in enumerate(rows)]",
        ("tests/loop/test_sampler.py",),
    ),
    Fault(
        "a recorded step goes on from the tokens of the step that it was recorded for",
        f"{THE_LOOP}/runner.py",
        "            graph.tokens.copy_(tokens)\n",
        "",
        ("tests/loop/test_loop.py",),
        "recorded",
    ),
)

SOURCES = (
    Fault(
        "padding in front of a prompt is part of it",
        f"{MODELING}/source_attention.py",
        "queries, keys = (first, torch.full_like(first, new_tokens)), (starts, stops)",
        "queries, keys = (first * 0, torch.full_like(first, new_tokens)), (starts * 0, stops)",
        ("tests/modeling/test_source_attention.py",),
        "those_of_sdpa",
    ),
    Fault(
        "a window that a family leaves to the mask is lost",
        f"{MODELING}/source_attention.py",
        "    if sliding_window is None:  # some",
        "    if False:  # some",
        ("tests/modeling/test_source_attention.py",),
        "qwen2-moe-sliding",
    ),
    Fault(
        "sequences of a static cache lie as far apart as they are long",
        f"{MODELING}/source_attention.py",
        "step, count = int(apart[0]) // page, tokens // page",
        "step, count = tokens // page, tokens // page",
        ("tests/modeling/test_source_attention.py",),
        "memory_of_a_cache",
    ),
    Fault(
        "every rank takes the first rotary keys",
        f"{MODELING}/attention.py",
        "k_pe[..., self.shard.rope_heads, :]",
        "k_pe[..., : self.geometry.num_rope_heads, :]",
        ("tests/modeling/test_tensor_parallel.py",),
    ),
)

FAULTS = (*SOURCES, *CACHES, *MODEL, *OPS, *LAYERS, *RUNS, *LOOP, *JUDGES)
