"""How the next token is chosen: parameters, logits processors, grammars, the sampler."""
