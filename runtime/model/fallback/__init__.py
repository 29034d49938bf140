"""Any other causal LM, in transformers' own layers over KV pages."""
