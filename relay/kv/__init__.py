"""KV blocks: who holds which, leases, checksums, and how bytes move between pools."""
