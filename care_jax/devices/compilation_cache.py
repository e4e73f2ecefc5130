"""Persistent compilation cache in the workdir, so that a restarted run compiles nothing."""

from __future__ import annotations

import hashlib
import pathlib
from collections import Counter

import jax

_EVENTS = {
    "/jax/compilation_cache/cache_hits": "found",
    "/jax/compilation_cache/cache_misses": "compiled",
}
_counts: Counter[str] = Counter()


def keep_programs(workdir: pathlib.Path) -> None:
    """Puts JAX's compilation cache in `workdir/compilation_cache`.

    A folder that is already set (JAX_COMPILATION_CACHE_DIR) takes precedence.
    """
    if not _counts:
        _counts.update(found=0, compiled=0)
        jax.monitoring.register_event_listener(_count)
    if jax.config.values["jax_compilation_cache_dir"] is None:
        folder = workdir / "compilation_cache" / _machine()
        jax.config.update("jax_compilation_cache_dir", str(folder))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def counts() -> dict[str, int]:
    """Number of programs that this process compiled, and that it read from the cache."""
    return dict(_counts)


def _count(event: str, **_) -> None:
    if event in _EVENTS:
        _counts[_EVENTS[event]] += 1


def _machine() -> str:
    """Folder name for this kind of CPU: code compiled for one kind may not run on another."""
    described = pathlib.Path("/proc/cpuinfo")
    lines = described.read_text().splitlines() if described.exists() else ()
    kinds = {line for line in lines if line.startswith(("model name", "flags"))}
    return hashlib.sha256("".join(sorted(kinds)).encode()).hexdigest()[:8] if kinds else "any"
