"""Images in a prompt: what stands for them in the index, and what the model reads instead."""
