"""The rotary part of a layer: which pairs stay rotary, and the linear maps that this makes."""
