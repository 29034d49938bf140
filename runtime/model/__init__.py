"""Models over KV pages: what runs them, what refuses them, and where their KV stands."""
