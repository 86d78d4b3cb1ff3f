"""Checkpoint to checkpoint: reading a source family, choosing rotary pairs and a latent, writing the MLA layers."""
