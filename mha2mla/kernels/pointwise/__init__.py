"""Ops between the products of a decoder layer: norms with their residuals, gated activations."""
