"""Speculative decoding without a draft model: what was said before is what is drafted."""
