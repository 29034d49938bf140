"""The hash-block mode: vLLM's automatic prefix caching, and its block hashes."""
