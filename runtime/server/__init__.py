"""The OpenAI-compatible server, as a command (`serve`) and as an app to embed (`app`)."""
