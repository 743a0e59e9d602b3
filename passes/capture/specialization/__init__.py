"""Value-dependent code in a trace: what is constant-folded, specialized and guarded."""
