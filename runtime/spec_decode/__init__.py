"""Speculative decoding without a draft model: drafts come from earlier texts."""
