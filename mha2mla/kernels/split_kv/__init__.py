"""Shared by paged decode ops: caches split over CTAs by a device-made plan, partial results merged afterwards."""
