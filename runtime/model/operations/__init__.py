"""What layers are made of, in several implementations, and which is taken."""
