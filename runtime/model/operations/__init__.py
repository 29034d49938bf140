"""The operations of the decoder loop, in several implementations, and their choice."""
