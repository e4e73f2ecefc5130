"""Settings of every test: eight virtual CPU devices, exact matrix products, checked shapes.

Most of the suite's time is compilation, so LLVM does not optimize, which halves it.

Set here, before jax initialises and before any module of ours is imported.
"""

import hashlib
import json
import os
import pathlib
import shutil
import sys

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")

import jax
import jaxtyping
import pytest

from care_jax.devices import loaded_programs, xla_flags

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # configs and experiments are folders, not installed packages

xla_flags.set_defaults()
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_default_matmul_precision", "highest")

# Each call of these checks its annotated shapes. Modules of records that pass through jax.tree.map
# with other leaves (shardings, paths) cannot be.
CHECKED_MODULES = [
    f"{folder}.{name}"
    for folder, names in {
        "care_jax.method": "advantages diagnostics objective select spans",
        "care_jax.decoding": "reflection sampling",
        "care_jax.learning": "logprobs optimizer",
        "care_jax.packing": "layout plan trees",
        "models": "attention.packed attention.kernels layers",
    }.items()
    for name in names.split()
]
jaxtyping.install_import_hook(CHECKED_MODULES, "beartype.beartype")


def pytest_configure(config: pytest.Config) -> None:
    """Compiled programs are kept in .pytest_cache, apart for each kind of CPU."""
    cpu = pathlib.Path("/proc/cpuinfo")
    if not hasattr(config, "cache") or not cpu.exists():
        return
    kinds = {
        line for line in cpu.read_text().splitlines() if line.startswith(("model name", "flags"))
    }
    kind = hashlib.sha256("".join(sorted(kinds)).encode()).hexdigest()[:8]
    jax.config.update("jax_compilation_cache_dir", str(config.cache.mkdir(f"jax-{kind}")))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)


@pytest.fixture(scope="module", autouse=True)
def few_mappings() -> None:
    """One process that runs the whole suite would load more programs than Linux lets it map."""
    loaded_programs.drop_if_many()


@pytest.fixture(scope="session")
def shared() -> pathlib.Path:
    """The folder of test data beside the repository; the test is skipped where it is absent."""
    folder = ROOT.parent / "shared"
    if not folder.is_dir():
        pytest.skip("needs the test data in ../shared")
    return folder


@pytest.fixture(scope="session")
def releases(shared, tmp_path_factory) -> dict[str, pathlib.Path]:
    """A folder for each family, with a real release's files as a user has them, less the weights.

    To be read, not written to: tests share them.
    """
    source = shared / "data" / "releases"
    if not source.is_dir():
        pytest.skip("needs the files of real releases in ../shared/data/releases")
    folders = {}
    for config in sorted(source.glob("*/config.json")):
        folder = tmp_path_factory.mktemp(config.parent.name)
        for path in (*config.parent.iterdir(), source / "vocab.json", source / "merges.txt"):
            shutil.copyfile(path, folder / path.name)
        folders[json.loads(config.read_text())["model_type"]] = folder
    return folders
