"""A layer's attention in one call: from projections as they come, through the cache, to the heads' outputs."""
