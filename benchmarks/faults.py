"""The faults that ``benchmarks/mutations.py`` puts into the code, one at a time, and the tests that must notice.

Each is a mistake that somebody made, or nearly made, here or in a similar project. A snippet occurs exactly once in its
file (``tests/benchmarks/test_mutations.py``): whoever changes that line gives the fault its new form.
"""

from __future__ import annotations

from collections.abc import Iterator
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


def faults_of(text: str) -> Iterator[Fault]:
    """Faults from lines that begin with # (name), @ (file), ? (tests, ``-k``), - (right) and + (wrong)."""
    for part in text.split("\n# ")[1:]:
        name, *lines = part.partition("\n\n")[0].split("\n")
        said = {sign: [line[1:] for line in lines if line[:1] == sign] for sign in "@?-+"}
        tests, _, only = "".join(said["?"]).strip().partition(" -k ")
        snippets = ("\n".join(said[sign]) for sign in "-+")
        yield Fault(name, said["@"][0].strip(), *snippets, tuple(tests.split()), only)


FAULTS = tuple(
    faults_of("""
== sources, tensor parallelism
# padding in front of a prompt is part of it
@ mha2mla/modeling/source_attention.py
? tests/modeling/test_source_attention.py -k those_of_sdpa
-queries, keys = (first, torch.full_like(first, new_tokens)), (starts, stops)
+queries, keys = (first * 0, torch.full_like(first, new_tokens)), (starts * 0, stops)
# a window that a family leaves to the mask is lost
@ mha2mla/modeling/source_attention.py
? tests/modeling/test_source_attention.py -k qwen2-moe-sliding
-    if sliding_window is None:  # some
+    if False:  # some
# sequences of a static cache lie as far apart as they are long
@ mha2mla/modeling/source_attention.py
? tests/modeling/test_source_attention.py -k memory_of_a_cache
-step, count = int(apart[0]) // page, tokens // page
+step, count = tokens // page, tokens // page
# every rank takes the first rotary keys
@ mha2mla/modeling/attention.py
? tests/modeling/test_tensor_parallel.py
-self.geometry, self.rope_heads = self.shard.geometry, self.shard.rope_heads
+self.geometry, self.rope_heads = self.shard.geometry, slice(self.shard.geometry.num_rope_heads)

== caches and pages
# kept rotary keys of a layer that is called without the model are rotated as if nothing were cached
@ mha2mla/modeling/attention.py
? tests/modeling/test_rotary_key_cache.py -k by_itself
-positions = torch.arange(latent.shape[1], device=latent.device) + first
+positions = torch.arange(latent.shape[1], device=latent.device) + 0 * first
# biases of rotary keys in 8 bits are quantised with them
@ mha2mla/modeling/attention.py
? tests/modeling/test_rotary_key_cache.py -k kept_keys_give
-tensors["k_pe"] = product(tensors["latent"], tensors["rope_weight"])[:, None]
+tensors["k_pe"] = self.k_rope_proj(tensors["latent"])[:, None]
# rotary keys in 8 bits are read without their bias
@ mha2mla/kernels/rope_append/api.py
? tests/kernels/mla_decode/test_mla_decode_int8_keys.py
-return (dequantize_latent(codes, scale, wide) + bias).to(dtype)
+return (dequantize_latent(codes, scale, wide) + 0 * bias).to(dtype)
# tiles of heads that each make all keys are modelled as one
@ mha2mla/kernels/mla_decode/cost.py
? tests/kernels/mla_decode/test_cost.py
-choice.cluster_size / choice.tiling.num_tiles
+choice.cluster_size
# "auto" goes by the first layer alone
@ mha2mla/kernels/mla_decode/cost.py
? tests/modeling/test_rotary_key_cache.py -k auto_rule
-latents = sum(2 * layer.kv_lora_rank for layer in layers)
+latents = len(layers) * 2 * layers[0].kv_lora_rank
# what a static cache held before a reset or a crop is read
@ mha2mla/modeling/latent_layer.py
? tests/modeling/test_cache.py tests/modeling/test_cache_errors.py
-return torch.where(there, latent, 0.0), None if keys
+return latent, None if keys
# behind a static layer's latents of "latent" there are no zeros
@ mha2mla/modeling/latent_layer.py
? tests/modeling/test_cache.py -k unused_pages
-return torch.where(there, latent, 0.0), None if keys
+return (latent if keys is None else torch.where(there, latent, 0.0)), None if keys
# positions are read on the host
@ mha2mla/modeling/cache.py
? tests/modeling/test_host_syncs.py
-(torch.arange(new_tokens, device=device) + self.get_seq_length())
+(torch.arange(new_tokens, device=device) + int(self.get_seq_length()))
# a full static cache writes over its neighbour
@ mha2mla/modeling/latent_layer.py
? tests/modeling/test_cache.py
-inside = token < self.capacity
+inside = token <= self.capacity
# beams keep each other's tokens
@ mha2mla/modeling/latent_layer.py
? tests/modeling/test_cache_machine.py
-rows = [rows[indices] for rows in self.rows()]
+rows = [rows[indices.sort().values] for rows in self.rows()]
# a fork does not own its pages
@ mha2mla/modeling/pages.py
? tests/modeling/test_paged_cache_machine.py
-for page in self._pages[twin]:
-            if page != NO_PAGE:
+for page in self._pages[twin][1:]:
+            if page != NO_PAGE:
# a shared page is free while somebody owns it
@ mha2mla/modeling/pages.py
? tests/modeling/test_paged_cache_machine.py
-if not self._owners[page]:
-            self._free.append(page)
+if self._owners[page] < 2:
+            self._free.append(page)
# a cropped sequence keeps its last page
@ mha2mla/modeling/pages.py
? tests/modeling/test_paged_cache_machine.py
-mine, kept = self._pages[sequence], self._pages_for(length)
+mine, kept = self._pages[sequence], self._pages_for(length + 1)
# padding rows of a batch write to page 0
@ mha2mla/kernels/rope_append/api.py
? tests/kernels/rope_append/test_rope_append.py -k not gpu
-known = (sequences >= 0) & (positions >= 0) & (page < max_pages)
+known = (positions >= 0) & (page < max_pages)
# slots are multiplied in 32 bits
@ mha2mla/kernels/rope_append/api.py
? tests/kernels/rope_append/test_rope_append.py tests/modeling/test_pages.py
-slot = entry.long() * page_size + positions % page_size
+slot = entry * page_size + positions % page_size
# the last token of a row is its next row's first
@ mha2mla/modeling/batch.py
? tests/modeling/test_batch.py tests/modeling/test_paged_batches.py
-return (self.cu_seqlens_q[1:].long() - 1).clamp_min(0)
+return self.cu_seqlens_q[1:].long().clamp_max(self.num_tokens - 1)
# outputs come back in the order of the rows
@ mha2mla/modeling/batch.py
? tests/modeling/test_batch.py
-return [mine[index] for index in range(len(mine))]
+return list(mine.values())

== the model
# plans outlive the pages that they were made for
@ mha2mla/modeling/cache.py
? tests/modeling/test_decode_step.py
-if self.planned_for != pages:
+if self.planned_for is None:
# layers of other windows share a schedule
@ mha2mla/modeling/step.py
? tests/modeling/test_decode_step.py
-same_schedule = (plan.num_ctas, limits, table.device)
+same_schedule = (plan.num_ctas, table.device)
# attention sinks are counted from the padding
@ mha2mla/modeling/modeling_mha2mla.py
? tests/modeling/test_attention_window.py
-(token < first + sinks)
+(token < sinks)
# a page is given back whose last token the next one sees
@ mha2mla/modeling/paged_cache.py
? tests/modeling/test_attention_window.py
-self.allocator.give_back(sequence, sinks, length + 1 - window)
+self.allocator.give_back(sequence, sinks, length + 2 - window)
# long queries under a window leave out the first token of the first one's
@ mha2mla/kernels/mixed_attention/layout.py
? tests/kernels/mixed_attention/test_mixed_attention.py -k window
-cached_length + 1 - window - (first + sinks)
+cached_length + 2 - window - (first + sinks)
# eight new tokens are expanded
@ mha2mla/modeling/latent_layer.py
? tests/modeling/test_forms.py
-if query_length <= MAX_DECODE_QUERY_LENGTH:
+if query_length < MAX_DECODE_QUERY_LENGTH:
# a refusal on a GPU is served by plain torch
@ mha2mla/modeling/served.py
? tests/modeling/test_forms.py tests/modeling/test_served.py
-if name is None and (backend is None or (device.type == "cuda" and not backend.compiled)):
+if name is None and backend is None:
# paged_cache takes plain torch on CUDA without a word
@ mha2mla/modeling/served.py
? tests/modeling/test_served.py
-if found[geometry][1] and device.type == "cuda"]
+if found[geometry][1] and device.type == "cpu"]
# a backend that is asked for by name leaves prompts to others
@ mha2mla/modeling/latent_layer.py
? tests/modeling/test_forms.py
-return LayerBackend(backend, layout, (name is not None or self._wants_prompts) and long_queries)
+return LayerBackend(backend, layout, False)
# 8-bit latents are expanded without their scales
@ mha2mla/modeling/latent_layer.py
? tests/modeling/test_forms.py
-latent = dequantize_latent(latent, stored["latent_scale"], self.dtype)
+latent = latent.to(self.dtype)
# attention over a first call reads its latents and not their codes
@ mha2mla/modeling/attention.py
? tests/modeling/test_latent_codes.py -k whole
-latent = latent if layer.is_empty and not has_codes else cached
+latent = latent if layer.is_empty else cached
# kept rotary keys are of the latents and not of their codes
@ mha2mla/modeling/attention.py
? tests/modeling/test_latent_codes.py -k kept_keys
-read = self._rounded(tensors["latent"], geometry)
+read = tensors["latent"]
# a step over codes without kept rotary keys copies them to 16 bits
@ mha2mla/kernels/mla_decode/api.py
? tests/modeling/test_latent_codes.py -k steps_call
-    if not g.has_codes:
+    if not (g.has_codes and g.has_rope_cache):
# rows of sinks are coded from the center of ordinary ones
@ mha2mla/kernels/row_codes/api.py
? tests/kernels/test_row_codes.py -k nearer_center
-is_second = _energy(second) < _energy(first)
+is_second = _energy(second) < 0 * _energy(first)
# a basis is folded into the encoder alone
@ mha2mla/conversion/latent/basis.py
? tests/conversion/latent/test_basis.py -k folding
-for name in ("k_b_proj", "v_b_proj", "k_rope_proj.weight"):
+for name in ("k_b_proj", "v_b_proj"):
# angles are counted in bfloat16
@ mha2mla/modeling/modeling_mha2mla.py
? tests/modeling/test_checkpoint.py tests/modeling/test_forms.py
-angle = position_ids[..., None, None].to(torch.float32) * inv_freq.to(torch.float32)
+angle = position_ids[..., None, None].to(dtype) * inv_freq.to(dtype)
# YaRN's factor is put on dims that do not rotate
@ mha2mla/modeling/modeling_mha2mla.py
? tests/conversion/families/test_conversions.py -k smollm3 or glm or olmo3 or partial
-factor = torch.where(inv_freq == 0, torch.ones_like(inv_freq), scaling)
+factor = scaling
# a decode plan is kept whatever the width of the table
@ mha2mla/modeling/step.py
? tests/serving/test_vllm_layer.py
-key = (batches[0].block_table.shape, query_length, attends)
+key = (batches[0].block_table.shape[0], query_length, attends)
# left padding is attended to in the absorbed form
@ mha2mla/modeling/latent_layer.py
? tests/modeling/test_forms.py tests/modeling/test_host_syncs.py
-None if starts is None else starts.to(self.device),
+None,
# batches are attended without their windows
@ mha2mla/modeling/backends.py
? tests/modeling/test_paged_batches.py
-dtype=dtype,
-        cache_starts=batch.cache_starts, window=constants.window,
+dtype=dtype,
+        cache_starts=batch.cache_starts, window=None,

== ops
# partials are kept in bfloat16
@ mha2mla/kernels/split_kv/plan.py
? tests/kernels/split_kv/test_partials.py tests/kernels/mla_decode/test_mla_decode.py -k plan or partial or workspace
-partial_out=torch.empty(num_ctas, 2, *shape[1:], dtype=torch.float32, device=device)
+partial_out=torch.empty(num_ctas, 2, *shape[1:], dtype=torch.bfloat16, device=device)
# causality is aligned to the top left
@ mha2mla/kernels/split_kv/reference.py
? tests/testing/test_problems.py
-limit = limit - (query.shape[1] - 1) + torch.arange(query.shape[1], device=token.device)
+limit = torch.arange(query.shape[1], device=token.device) + 1 + 0 * limit
# a window is one token too long
@ mha2mla/kernels/split_kv/reference.py
? tests/testing/test_problems.py
-(token >= limit[..., None] - window)
+(token >= limit[..., None] - window - 1)
# NaN in a page that nobody reads reaches the output
@ mha2mla/kernels/split_kv/reference.py
? tests/testing/test_problems.py
-torch.where(used, cache[self.page, self.row].to(self.dtype), 0)
+cache[self.page, self.row].to(self.dtype)
# weights lose digits to the log-sum-exp's rounding
@ mha2mla/kernels/split_kv/reference.py
? tests/testing/test_problems.py tests/testing/test_numeric_check.py
-torch.softmax(score, dim=-1))
+torch.exp(score.float() - lse.half().float()[..., None]).to(score))
# a partial without weight may make the merge NaN
@ mha2mla/kernels/attention_combine.py
? tests/kernels/attention_combine/test_attention_combine.py
-part = torch.where(weight > 0, partial_out.to(arithmetic), 0)
+part = partial_out.to(arithmetic)
# the merge's log-sum-exp is to base 2
@ mha2mla/kernels/attention_combine.py
? tests/kernels/attention_combine/test_attention_combine.py
-return (weight * part).sum(0).to(dtype or partial_out.dtype), total
+return (weight * part).sum(0).to(dtype or partial_out.dtype), total * 1.442695040888963
# pairs are turned the wrong way
@ mha2mla/kernels/rope_append/api.py
? tests/kernels/rope_append/test_rope_append.py
-turned = first * cos - second * sin, second * cos + first * sin
+turned = first * cos + second * sin, second * cos - first * sin
# tokens without a slot are written
@ mha2mla/kernels/rope_append/api.py
? tests/kernels/rope_append/test_rope_append.py
-valid = (slots >= 0) & (slots < capacity)
+valid = slots < capacity
# an infinite latent is stored as a number
@ mha2mla/kernels/mla_decode/quantization.py
? tests/kernels/mla_decode/test_mla_decode_fp8.py -k finite
-scale = torch.where(largest.isfinite(), scale, torch.nan)
+scale = torch.where(largest.isnan(), torch.nan, scale.clamp_max(1e30))
# rotary keys wider than shared memory are accepted
@ mha2mla/kernels/mla_decode/selection.py
? tests/modeling/test_served.py
-groups * rope <= MAX_ROPE_WIDTH,
+groups * rope > 0,
# a limit is raised and the documentation is not
@ mha2mla/kernels/mla_decode/selection.py
? tests/test_limits.py
-MAX_LATENT = 1024
+MAX_LATENT = 1088
# the last rotary columns of a tile are neither CTA's
@ mha2mla/kernels/mla_decode/selection.py
? tests/kernels/mla_decode/test_halves.py
--(-(tiling.groups_per_tile * qk_rope_head_dim) // (8 * CLUSTER)) * 8
+max(8, tiling.groups_per_tile * qk_rope_head_dim // (8 * CLUSTER) * 8)
# 32 heads take another kernel than 16 and 64
@ mha2mla/kernels/mla_decode/selection.py
? tests/kernels/mla_decode/test_head_counts.py tests/kernels/mla_decode/test_mla_decode.py
-hopper, packed = capability == HOPPER, codes
+hopper, packed = capability == HOPPER and shape.heads != 32, codes
# importing the package patches transformers
@ mha2mla/__init__.py
? tests/test_no_patching.py
-from __future__ import annotations
-
+from __future__ import annotations
+
+import transformers.models.llama.modeling_llama as _llama
+
+_llama.LlamaAttention.forward = lambda self, *args, **keys: (args[0], None)
+

== conversion's layers
# the value bias is lost
@ mha2mla/conversion/layer.py
? tests/conversion/test_layer.py
-offset = offset + weights.v_bias.view(kv_heads, d).repeat_interleave(spec.group_size, 0)
+offset = offset + 0 * weights.v_bias.view(kv_heads, d).repeat_interleave(spec.group_size, 0)
# the value bias is folded in another order of heads
@ mha2mla/conversion/layer.py
? tests/conversion/test_layer.py
-weights.v_bias.view(kv_heads, d).repeat_interleave(spec.group_size, 0)
+weights.v_bias.view(kv_heads, d).repeat(spec.group_size, 1)
# the mean phase is on the wrong side
@ mha2mla/conversion/rope.py
? tests/conversion/test_rotary_basis.py
-query_nope.append(real_map(identity[rest[a]] * phase[h]))
+query_nope.append(real_map(identity[rest[a]] * phase[h].conj()))
# shared queries are not conjugated
@ mha2mla/conversion/rope.py
? tests/conversion/test_rotary_basis.py
-query_rope = real_map(components.decode.mH)
+query_rope = real_map(components.decode.mT)
# a dim is kept without its partner
@ mha2mla/conversion/rope.py
? tests/conversion/test_rotary_basis.py
-return torch.cat([torch.cat([real, -imag], -1), torch.cat([imag, real], -1)], -2)
+return torch.cat([torch.cat([real, imag], -1), torch.cat([imag, real], -1)], -2)
# the least important pairs are kept
@ mha2mla/conversion/rope.py
? tests/conversion/test_rope_rules.py
-scores.sort(dim=0, descending=True, stable=True).indices[: problem.pairs]
+scores.sort(dim=0, descending=False, stable=True).indices[: problem.pairs]
# the covariance is not centred
@ mha2mla/conversion/calibration/statistics.py
? tests/conversion/calibration/test_statistics.py tests/conversion/test_layer_walk.py
-covariance = self._outer / self.tokens - torch.outer(mean, mean)
+covariance = self._outer / self.tokens
# keys of the latent are weighted by the inverse
@ mha2mla/conversion/latent/rules.py
? tests/conversion/latent/test_rules.py
-key_part = key_inverse @ decoder[:rows]
+key_part = key_root @ decoder[:rows]
# the smallest components are kept
@ mha2mla/conversion/latent/rules.py
? tests/conversion/latent/test_rules.py
-vectors, scale = vectors.flip(1), _lifted(energy).flip(0).sqrt()
+vectors, scale = vectors, _lifted(energy).flip(0).sqrt()
# KL is taken the other way round
@ mha2mla/conversion/predictions.py
? tests/pipeline/test_verify.py -k what_the_models_say
-kl_div(log_q, log_p,
+kl_div(log_p, log_q,

== runs and their files
# NaN passes the proof of full rank
@ mha2mla/pipeline/verify.py
? tests/pipeline/test_verify.py -k full_rank
-if exact is not None and not error <= tolerance:
+if exact is not None and error > tolerance:
# the names that were written are not compared
@ mha2mla/pipeline/verify.py
? tests/pipeline/test_verify.py -k names
-if different := sorted(reader.names() ^ converted.expected_names()):
+if different := sorted(() if reader.names() else ("",)):
# a geometry that no kernel serves is converted without a word
@ mha2mla/pipeline/report.py
? tests/pipeline/test_report.py -k kernel
-slow = [layer for layer in layers if not layer.compiled]
+slow = [layer for layer in layers if layer.compiled]
# resuming does not ask for the code
@ mha2mla/pipeline/prepare.py
? tests/test_resume.py tests/conversion/test_resume.py -k code or device or fingerprint or request or another or
? differ
-"code": code_hash(),
+"code": "",
# resuming does not ask for the device
@ mha2mla/pipeline/prepare.py
? tests/test_resume.py tests/conversion/test_resume.py -k code or device or fingerprint or request or another or
? differ
-"device": device_name(plan.model.device),
+"device": "",
# layers of another conversion are taken
@ mha2mla/conversion/resume.py
? tests/conversion/test_resume.py
-same = theirs == json.loads(self._text)
+same = bool(theirs)
# a checkpoint is not on the disk when it has its name
@ mha2mla/files.py
? tests/test_files.py -k synced
-        os.fsync(handle)
+        os.fstat(handle)
# the old folder is deleted before the new one is there
@ mha2mla/conversion/destination.py
? tests/conversion/test_destination.py
-            final.rename(old)
-        temporary.rename(final)
+            remove(final)
+        temporary.rename(final)
# a tensor with NaN is written
@ mha2mla/conversion/destination.py
? tests/conversion/test_writer.py
-if tensor.is_floating_point() and not is_finite(tensor):
+if tensor.is_floating_point() and torch.isinf(tensor).any():
# the index names the wrong file
@ mha2mla/conversion/destination.py
? tests/conversion/test_writer.py
-weight_map |= dict.fromkeys(names, final)
+weight_map |= dict.fromkeys(names[:-1] or names, final)

== the loop
# all that the owner of a beginning has is taken for the beginning
@ mha2mla/loop/scheduler.py
? tests/loop/test_scheduler.py
-                self.allocator.truncate(sequence, shared)
-
+
# all of a prompt is found in the cache, and no token is left to choose the next one by
@ mha2mla/loop/scheduler.py
? tests/loop/test_scheduler.py
-range(0, len(tokens) - self.page_size, self.page_size)
+range(0, len(tokens) - self.page_size + 1, self.page_size)
# a request loses its pages before those that nobody runs are forgotten
@ mha2mla/loop/scheduler.py
? tests/loop/test_scheduler.py
-            if not self._forget_ended():
-                last
+            if True:
+                last
# freed pages stay among the beginnings that may be shared
@ mha2mla/loop/scheduler.py
? tests/loop/test_scheduler.py
-            self._prefixes.remove(sequence)
+            pass
# a token that came behind the end is part of the answer
@ mha2mla/loop/scheduler.py
? tests/loop/test_scheduler.py
-        if self.finished is not None:
-            return
-
+
# a token is drawn by its row's number in the batch
@ mha2mla/loop/sampler.py
? tests/loop/test_sampler.py
-[[row.seed, position] for row, position in zip(rows, positions, strict=True)]
+[[row.seed, position] for position, row in enumerate(rows)]
# a token is drawn by where its chunk begins
@ mha2mla/loop/loop.py
? tests/loop/test_loop.py -k chunks
-[0 if chunk is None else chunk.start + chunk.count for chunk in ordered]
+[0 if chunk is None else chunk.start for chunk in ordered]
# decodes are counted as tokens of prompts
@ mha2mla/loop/loop.py
? tests/loop/test_loop.py -k progress
-[min(chunk.start + chunk.count, len(chunk.request.prompt)) - chunk.start for chunk in chunks]
+[chunk.count for chunk in chunks]
# every prompt has the same seed
@ mha2mla/loop/answering.py
? tests/loop/test_answering.py -k seed_of_its_own
-replace(sampling, seed=sampling.seed + number)
+replace(sampling, seed=sampling.seed)
# a recorded step goes on from the tokens of the step that it was recorded for
@ mha2mla/loop/runner.py
? tests/loop/test_loop.py -k recorded
-            graph.tokens.copy_(tokens)
-
+

== judges
# a compiler's report outlives the kernel that it is of
@ tests/kernels/compile_gate.py
? tests/kernels/test_gate_reports.py
-[function.script(show_meta=True), arch,
+[str(function.attrs["global_symbol"]), arch,
# a word that is reinterpreted twice, as in codes that an H100 decoded wrong, is not seen
@ tests/kernels/compile_gate.py
? tests/kernels/test_gate_reports.py
-sum(count > 1 for
+sum(count > 99 for
# auto keeps keys that gain less than the model's error
@ mha2mla/kernels/mla_decode/cost.py
? tests/kernels/mla_decode/test_cost.py -k faster_way
-CHEAP_GAIN, GAIN = 1.03,
+CHEAP_GAIN, GAIN = 1.0,
# the judge allows ten times torch's error
@ mha2mla/testing/numeric_check.py
? tests/testing/test_numeric_check.py
-ERROR_FACTOR = 2.0
+ERROR_FACTOR = 10.0
# one far number is not seen
@ mha2mla/testing/numeric_check.py
? tests/testing/test_numeric_check.py
-elif not largest <= highest:
+elif not largest <= 1e3 * highest:
# NaN is not seen by the judge
@ mha2mla/testing/numeric_check.py
? tests/testing/test_numeric_check.py tests/testing/test_problems.py
-if not (torch.equal(out.isnan(), expected.isnan()) and torch.equal(out.isinf(), expected.isinf())):
+if not torch.equal(out.isinf(), expected.isinf()):
# rounding is expected to be a thousand times what it is
@ mha2mla/testing/numeric_check.py
? tests/testing/test_numeric_check.py
-UNIT = torch.finfo(torch.float32).eps / 2
+UNIT = torch.finfo(torch.float32).eps * 500
# what is wrong gets a time
@ mha2mla/eval/measurement.py
? tests/eval/test_latency.py
-return row | {"status": f"{WRONG}{check.reason}"}
+row["status"] = f"{WRONG}{check.reason}"
# the first token is counted among the further ones
@ mha2mla/eval/latency.py
? tests/eval/test_latency.py -k further_token
-(all_tokens - first) / (new_tokens - 1)
+(all_tokens - first) / new_tokens
# a sliding source caches every token
@ mha2mla/modeling/config.py
? tests/modeling/test_config.py -k cached_tokens
-else min(length, window - 1 or length) for
+else length for
# what a conversion's window hides counts as read
@ mha2mla/modeling/config.py
? tests/modeling/test_config.py -k latent_cache
-else min(length, window) for
+else length for
# a key that a recipe has twice is its last one
@ mha2mla/conversion/recipe.py
? tests/conversion/test_recipe.py
-            if key in seen:
+            if False:
# a wrong row ends with exit code 0
@ mha2mla/eval/measurement.py
? tests/test_verbs.py -k wrong
-return [row for row in rows if row["status"].startswith(WRONG)]
+return [row for row in rows if row["status"] == WRONG]
# clusters are counted as if they came out even with the multiprocessors of a GPC
@ mha2mla/kernels/skinny_linear/selection.py
? tests/kernels/skinny_linear/test_skinny_linear.py -k one_wave
-return room if split <= 2 else room * 10 // 11
+return room
# what nobody may see is not poisoned
@ mha2mla/testing/problems.py
? tests/testing/test_problems.py
-buffer.masked_fill_(hidden[..., None], torch.nan)
+buffer.masked_fill_(hidden[..., None], 0)
== healing
# a masked token counts like any other
@ mha2mla/healing/loss.py
? tests/healing/test_loss.py
-    loss = (log_p.sub_(log_q).mul_(p).sum(-1) * weights).sum()
+    loss = log_p.sub_(log_q).mul_(p).sum()
# a checkpoint that was not finished is gone on from
@ mha2mla/healing/training.py
? tests/healing/test_training.py tests/healing/test_run.py -k checkpoint or killed
-            if all((each / name).stat().st_size == size for name, size in sizes.items()):
+            if True:
# evaluation before training leaves the model out of data parallelism
@ mha2mla/healing/training.py
? tests/healing/test_run.py -k two_processes
-    started = _now(device)
-    with deterministic
+    trainer.evaluate()
+    started = _now(device)
+    with deterministic
# frozen weights have memory of their own
@ mha2mla/healing/student.py
? tests/healing/test_run.py -k memory
-                setattr(module, name, other)
+                pass
""")
)
