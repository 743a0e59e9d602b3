"""Search under linear constraints (rows): prices, mixtures, branches; tied layers."""
