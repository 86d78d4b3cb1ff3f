"""MLA decode over a latent cache of e4m3 numbers with a float32 scale per token."""
