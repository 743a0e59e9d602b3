"""From chosen layouts to a program on local tensors: lower, together, hoisted and bucket, one after another."""
