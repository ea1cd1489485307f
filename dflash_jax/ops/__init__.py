"""Operations: a reference each, and the implementations that platforms have."""
