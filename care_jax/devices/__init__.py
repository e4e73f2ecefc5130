"""Devices and processes: sharding, multi-host runs, checkpoints, hardware rooflines."""
