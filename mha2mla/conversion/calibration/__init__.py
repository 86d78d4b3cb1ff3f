"""Calibration text in token windows, and what is measured on it: activations and statistics of a layer."""
