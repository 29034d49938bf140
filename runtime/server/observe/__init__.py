"""Metrics, traces and the log of requests."""
