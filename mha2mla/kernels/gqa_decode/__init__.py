"""GQA and MHA decode: attention of a few new tokens over a paged cache of keys and values."""
