"""Attention of ragged batches: queries of any length per sequence over a paged cache that holds them already."""
