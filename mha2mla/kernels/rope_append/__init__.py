"""RoPE of new tokens' queries and keys, fused with writing keys and their companions into a paged cache."""
