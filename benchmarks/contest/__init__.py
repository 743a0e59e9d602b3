"""The ASPLOS'25 contest on intra-operator parallelism: a memory limit at each moment (liveness)."""
