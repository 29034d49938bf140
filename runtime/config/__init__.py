"""Settings as users write them: flags, variables, amounts of memory."""
