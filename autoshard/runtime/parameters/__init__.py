"""Parameters on their way into the computation, and their gradients back: buckets, prefetch, what is made again."""
