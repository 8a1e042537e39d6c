"""HTTP: the OpenAI routes and the whole-server routes, on hypercorn and starlette. Knows the gateway actor and nothing beyond it."""
