"""Local shards as DTensors: parameters and outputs; patches of torch's DTensor."""
