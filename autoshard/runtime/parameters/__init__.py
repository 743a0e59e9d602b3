"""Parameters and gradients: buckets, prefetch, gradient reduction, recomputation."""
