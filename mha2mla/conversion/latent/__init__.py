"""The latent of a layer: low-rank rules, and how the rank is shared out among the layers."""
