"""Attention on shards of heads and sequences: ring attention, zigzag order, KV head chunks."""
