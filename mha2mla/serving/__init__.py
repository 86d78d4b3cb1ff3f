"""What other engines need of a converted checkpoint: a plug-in for vLLM, and exports. Nothing else imports it."""
