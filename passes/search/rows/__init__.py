"""The search with rows, such as memory and what hides: prices, mixtures, branches; equal layers as one."""
