"""MLA decode: attention of a few new tokens over a paged latent cache, in the absorbed form."""
