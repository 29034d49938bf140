"""What layers without full attention keep: states and windows, of sequences and saved ones."""
