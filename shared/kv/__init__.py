"""The KV transfer: manifest, safetensors codec, digests, tickets, transports. Deals in bytes, not tensors."""
