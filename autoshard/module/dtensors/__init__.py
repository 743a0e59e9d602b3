"""Local tensors as torch's DTensors: parameters, outputs, and what torch's DTensor has to be helped with."""
