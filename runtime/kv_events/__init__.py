"""Tells routers what is cached, as vLLM 0.33 does.

Dynamo, llm-d and Ray's KV-aware router send a request to where its prefix is. Messages on ZeroMQ
tell them which blocks of tokens each engine stores and removes: one batch for each step that has
changed any. Batches are numbered; the last ones are kept for subscribers that come later or miss
some.
"""
