"""Operations: one documented reference each, and an ordered list of implementations for platforms."""
