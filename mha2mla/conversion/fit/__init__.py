"""Fitting a converted layer to what the source computes: in closed form, then by gradient steps."""
