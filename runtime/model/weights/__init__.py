"""Where the weights of a description are in a checkpoint or a GGUF file, and how they are read."""
