"""Against the unsharded model: verification, the first divergence, checks of rules, coverage."""
