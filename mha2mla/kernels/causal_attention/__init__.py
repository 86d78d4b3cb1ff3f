"""Causal attention of equally long windows with gradients that repeat to the bit."""
