"""Integer codes of latent rows, paged caches of them, and the kernels that write and read these."""
