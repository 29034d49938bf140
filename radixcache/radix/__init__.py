"""The radix mode: the token-exact tree, and the cache over it."""
