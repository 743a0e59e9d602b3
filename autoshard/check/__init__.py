"""Checks: verification, first divergence, rule validation, coverage, calibration, measurement."""
