"""The ways KV travels from a prefill to a decode worker: one file each, both sides and a self-test in it."""
