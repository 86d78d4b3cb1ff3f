"""Merging partial attention results by their log-sum-exps."""
