"""Converted checkpoints in other engines: a plug-in for vLLM, and exports. Nothing else imports it."""
