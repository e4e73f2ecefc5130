"""Settings of every test: eight virtual CPU devices, exact matrix products, checked shapes.

Most of the suite's time is compilation. LLVM does not optimize, which halves it, and compiles a
program as one module. With JAX 0.10 XLA:CPU emits its fusions without MLIR, which halves it again.

Set here, before jax initialises and before any module of ours is imported.
"""

import collections
import hashlib
import importlib.metadata
import json
import os
import pathlib
import platform
import shutil
import sys
import time
from collections.abc import Iterator

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"
    + " --xla_cpu_use_fusion_emitters=false" * (importlib.metadata.version("jaxlib") < "0.11"),
)

import jax
import jaxtyping
import pytest
from absl import flags, logging
from absl.testing import flagsaver

from care_jax.devices import compilation, loaded_programs, xla_flags

ROOT = pathlib.Path(__file__).resolve().parent.parent


def cache_folder() -> pathlib.Path:
    """For compiled programs: outside the checkout, so that another checkout finds them too.

    Named by the pinned versions and the kind of CPU; JAX's own keys cover the rest.
    """
    cpu = pathlib.Path("/proc/cpuinfo")
    lines = cpu.read_text().splitlines() if cpu.exists() else [platform.processor()]
    kinds = sorted({line for line in lines if line.startswith(("model", "flags"))})
    versions = [path.read_text() for path in sorted(ROOT.glob("constraints*.txt"))]
    name = hashlib.sha256("\n".join([sys.version, *versions, *kinds]).encode()).hexdigest()[:12]
    caches = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    return pathlib.Path(caches, "care_jax_tests", name)


sys.path.insert(0, str(ROOT))  # configs and experiments are folders, not installed packages

xla_flags.set_defaults()
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_default_matmul_precision", "highest")
# In the environment too, for the processes which tests start.
CACHE = os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(cache_folder()))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
jax.config.update("jax_compilation_cache_dir", CACHE)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
compilation.keep_programs()  # as a run does, so that all tests find the same entries

# Each call of these checks its annotated shapes. Modules of records that pass through jax.tree.map
# with other leaves (shardings, paths) cannot be.
CHECKED_MODULES = [
    f"{folder}.{name}"
    for folder, names in {
        "care_jax.method": "advantages diagnostics objective select spans",
        "care_jax.decoding": "reflection sampling",
        "care_jax.learning": "blocked_softmax logprobs optimizer",
        "care_jax.packing": "layout plan trees",
        "models": "attention.packed attention.kernels layers",
    }.items()
    for name in names.split()
]
jaxtyping.install_import_hook(CHECKED_MODULES, "beartype.beartype")


DURATIONS = ROOT / "tests" / "durations.json"  # seconds of every test of a second or more


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--record_durations",
        action="store_true",
        help=f"write {DURATIONS.name} (of all tests: -m '')",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Deletes programs of our own cache that were compiled more than two weeks ago."""
    if not hasattr(config, "workerinput"):  # which the workers of pytest-xdist have
        for path in cache_folder().glob("*"):
            if path.stat().st_mtime < time.time() - 14 * 86400:
                path.unlink(missing_ok=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files in descending order of duration: a long one started last would run alone.

    Exhaustive tests that have no duration yet count 5 s.
    """
    known = json.loads(DURATIONS.read_text())
    seconds = collections.Counter()
    for item in items:
        unknown = 5.0 if item.get_closest_marker("exhaustive") else 0.05
        seconds[item.path] += known.get(item.nodeid, unknown)
    items.sort(key=lambda item: -seconds[item.path])


_seconds: collections.Counter[str] = collections.Counter()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _seconds[report.nodeid] += report.duration


def pytest_sessionfinish(session: pytest.Session) -> None:
    if session.config.option.record_durations and not hasattr(session.config, "workerinput"):
        slow = {name: round(each, 1) for name, each in sorted(_seconds.items()) if each >= 1}
        DURATIONS.write_text(json.dumps(slow, indent=0) + "\n")


@pytest.fixture(scope="module", autouse=True)
def few_mappings() -> None:
    """One process that runs the whole suite would load more programs than Linux lets it map."""
    loaded_programs.drop_if_many()


@pytest.fixture(autouse=True)
def same_verbosity() -> Iterator[None]:
    """Commands set which messages are printed."""
    before = logging.get_verbosity()
    yield
    logging.set_verbosity(before)


@pytest.fixture
def one_device() -> Iterator[None]:
    import small_run  # behind the import hook above

    with small_run.on_one_device():
        yield


@pytest.fixture
def run_command(monkeypatch, capsys):
    """Runs `python -m care_jax.main` in this process; returns its status and standard error."""
    from care_jax import main

    def run_command(*arguments):
        monkeypatch.setattr(main.distributed, "start", lambda *_: None)  # JAX has started
        monkeypatch.setattr(main.interrupts, "watch", lambda: None)
        monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)  # restored after the test
        monkeypatch.setattr(sys, "argv", ["main", *map(str, arguments)])
        monkeypatch.chdir(ROOT)
        with flagsaver.flagsaver(), pytest.raises(SystemExit) as stopped:
            main.run_main()
        return stopped.value.code, capsys.readouterr().err

    before = {*flags.FLAGS}
    yield run_command
    for name in {*flags.FLAGS} - before:
        delattr(flags.FLAGS, name)


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
