"""Tiers below the KV pool: pages on disk, and what moves them."""
