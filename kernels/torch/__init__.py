"""Plain torch: any device and dtype. What other folders have no kernel for is here."""
