"""Attention over flattened batches of sequences of any lengths: prefill."""
