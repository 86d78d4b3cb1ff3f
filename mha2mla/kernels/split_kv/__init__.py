"""What paged decode ops share: caches split over CTAs by a device-made plan, partial results merged afterwards."""
