"""What every engine is given."""

KV_BYTES = 256 << 20
"""KV memory: 32,768 tokens of the model."""

MAX_TOKENS = 32_768

THREADS = 2
