"""API keys and what they may use: the key file, the headers that bring a key, and exact accounts of limits. No sockets, no clock."""
