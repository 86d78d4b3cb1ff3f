"""vLLM's connector that fills the cache of new requests, for caches of bytes too; loaded by vLLM by this name."""

from __future__ import annotations

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.decode_bench_connector import (
    DecodeBenchConnector,
    DecodeBenchConnectorWorker,
)


class FillConnector(DecodeBenchConnector):
    """Fills by :class:`FillWorker`."""

    def __init__(self, vllm_config, role, kv_cache_config) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        if self.connector_worker is not None:
            self.connector_worker = FillWorker(vllm_config)


class FillWorker(DecodeBenchConnectorWorker):
    """Random numbers; of bytes those that are small and finite as float8, float16 and bfloat16, scales included."""

    def _fill_block_tensor(self, kv_cache: torch.Tensor, block_ids: list[int]) -> None:
        if kv_cache.dtype != torch.uint8:
            return super()._fill_block_tensor(kv_cache, block_ids)
        blocks = torch.tensor(block_ids, dtype=torch.long, device=kv_cache.device)
        shape = (len(blocks), *kv_cache.shape[1:])
        kv_cache[blocks] = torch.randint(0x20, 0x30, shape, dtype=torch.uint8, device=kv_cache.device)
        return None
