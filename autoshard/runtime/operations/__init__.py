"""Operations on local tensors whose ranks exchange something, and the collectives that generated code calls."""
