"""The routes: chat completions, completions, responses, messages."""
