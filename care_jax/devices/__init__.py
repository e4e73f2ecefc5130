"""Devices and processes: sharding, several hosts, checkpoints, what hardware can do."""
