"""The OpenAI HTTP surface without HTTP: bodies into validated requests, tokens into responses and SSE events."""
