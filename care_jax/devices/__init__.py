"""Devices and processes: sharding, multi-host runs, RNG streams, compilation cache, FLOPs."""
