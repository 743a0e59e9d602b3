"""Polyfills: functions that tracing gets wrong, replaced by ones that it gets right."""
