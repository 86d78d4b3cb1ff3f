"""Training after a conversion: distillation from the source model."""
