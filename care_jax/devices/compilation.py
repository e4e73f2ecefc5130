"""The programs that this process compiles: kept on disk, counted, and announced.

The last two follow the events that JAX records while it compiles (`jax.monitoring`).

JAX stores a program without a sum (zlib has a weak one, zstd none), and never replaces an entry.
Here an entry begins with the SHA-256 of its key and content; one that does not match is deleted,
and its program is compiled again.
"""

from __future__ import annotations

import hashlib
import os
import pathlib
import sys
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import jax
from absl import logging
from jax._src import compilation_cache  # no public function chooses the cache

_EVENTS = {
    "/jax/compilation_cache/cache_hits": "found",
    "/jax/compilation_cache/cache_misses": "compiled",
}
_LOWERED = "/jax/core/compile/jaxpr_to_mlir_module_duration"  # the compiler starts
_COMPILED = "/jax/core/compile/backend_compile_duration"  # also when it was found in the cache
_SILENT_SECONDS = 1.0  # a program that takes no longer is not announced
_SUM_BYTES = hashlib.sha256().digest_size
_counts: Counter[str] = Counter()


def keep_programs() -> None:
    """Keeps compiled programs in the user's cache folder, for restarts and for other runs.

    A folder that is already set (JAX_COMPILATION_CACHE_DIR) takes precedence. Without a folder that
    can be written, programs are compiled anew.
    """
    if not _counts:
        _counts.update(found=0, compiled=0)
        jax.monitoring.register_event_listener(_count)
        opened = compilation_cache.get_file_cache
        compilation_cache.get_file_cache = lambda path: (
            (found := opened(path)) and (_Sealed(found[0]), found[1])
        )
        compilation_cache.reset_cache()  # one that is open already
    if jax.config.values["jax_compilation_cache_dir"] is None:
        try:
            folder = _folder() / _machine()
            folder.mkdir(parents=True, exist_ok=True)
        except (OSError, RuntimeError) as error:  # RuntimeError: the user has no home
            advice = "set JAX_COMPILATION_CACHE_DIR to a folder that can be written"
            logging.warning("compiled programs are not kept (%s); %s", error, advice)
            return
        jax.config.update("jax_compilation_cache_dir", str(folder))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def keep_no_programs() -> None:
    """Neither reads nor writes a cache, whatever JAX_COMPILATION_CACHE_DIR says."""
    jax.config.update("jax_enable_compilation_cache", False)


def counts() -> dict[str, int]:
    """Number of programs that this process compiled, and that it read from the cache."""
    return dict(_counts)


class Announcer:
    """Says which program is being compiled, once it takes over a second.

    Args:
        say: prints a line.
        labels: what a program is for, by the name of its jitted function; others are not announced.
        expected: number of programs with a label, if each is compiled for one shape.
    """

    def __init__(self, say: Callable[[str], None], labels: Mapping[str, str], expected: int):
        self._say, self._labels, self._expected = say, labels, expected
        self._number = 0
        self._timer = threading.Timer(0, int)  # of the program that is being compiled

    def __enter__(self) -> None:
        jax.monitoring.register_event_duration_secs_listener(self._listen)

    def __exit__(self, *_: object) -> None:
        jax.monitoring.unregister_event_duration_listener(self._listen)
        self._timer.cancel()

    def _listen(self, event: str, duration_secs: float, **about: object) -> None:
        label = self._labels.get(str(about.get("fun_name")).removeprefix("jit(").removesuffix(")"))
        if label is None or event not in (_LOWERED, _COMPILED):
            return
        self._timer.cancel()
        if event == _LOWERED:
            self._number += 1
            is_expected = self._number <= self._expected
            of = f"of {self._expected}" if is_expected else "for another shape"
            line = f"compiling {label} ({self._number} {of})..."
            self._timer = threading.Timer(_SILENT_SECONDS, self._say, (line,))
            self._timer.daemon = True
            self._timer.start()


class _Sealed:
    """JAX's cache in a folder, with sums.

    Entries have their own names, as the folder may be shared with other programs.
    """

    def __init__(self, cache: Any):
        self._cache, self._path = cache, pathlib.Path(cache._path)

    def get(self, key: str) -> bytes | None:
        """The entry, or None: it is absent or was damaged."""
        key = f"{key}-sealed"
        entry = self._cache.get(key)
        if entry is None or entry[:_SUM_BYTES] == _sum_of(key, entry[_SUM_BYTES:]):
            return entry and entry[_SUM_BYTES:]
        path = self._path / f"{key}-cache"
        path.unlink(missing_ok=True)
        print(f"compiled program {path} was damaged; compiling it again", file=sys.stderr)
        return None

    def put(self, key: str, value: bytes) -> None:
        """Stores an entry; keeps one that is there already."""
        key = f"{key}-sealed"
        self._cache.put(key, _sum_of(key, value) + value)


def _sum_of(key: str, value: bytes) -> bytes:
    return hashlib.sha256(key.encode() + value).digest()


def _count(event: str, **_) -> None:
    if event in _EVENTS:
        _counts[_EVENTS[event]] += 1


def _folder() -> pathlib.Path:
    cache = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    return pathlib.Path(cache) / "care_jax" / "compiled"


def _machine() -> str:
    """Folder name for this kind of CPU: code compiled for one kind may not run on another."""
    described = pathlib.Path("/proc/cpuinfo")
    lines = described.read_text(encoding="utf-8").splitlines() if described.exists() else ()
    kinds = {line for line in lines if line.startswith(("model name", "flags"))}
    return hashlib.sha256("".join(sorted(kinds)).encode()).hexdigest()[:8] if kinds else "any"
