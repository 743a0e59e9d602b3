"""Initial values of sharded parameters, bit for bit those of one device."""
