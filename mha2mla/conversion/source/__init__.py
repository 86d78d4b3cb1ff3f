"""The source checkpoint: its files, its tensors, what is refused of it, and running it layer by layer."""
