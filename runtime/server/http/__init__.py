"""The socket, the signals, who may come in, bodies and errors."""
