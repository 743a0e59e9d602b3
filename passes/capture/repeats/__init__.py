"""Equal modules are traced once: what the others call is compared with it, and written out after the trace."""
