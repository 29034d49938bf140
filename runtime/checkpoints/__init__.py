"""A checkpoint as files: in a folder, in a GGUF file or on the Hugging Face hub."""
