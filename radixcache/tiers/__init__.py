"""Tiers below the pool: which evicted pages they keep, and what their stores are asked for."""
