"""Imports run one way, jax.jit stands in four rooms, torch stays out of the program.

The whole architecture in one table: a module of care_jax may import from its own layer and from
those above it in the table. A package's row covers the modules inside it.
"""

import ast
import pathlib

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
OURS = ("care_jax", "models", "configs", "experiments")

# fmt: off
LAYERS = (
    ("records",             ("batch",)),
    ("devices",             ("devices",)),
    ("prompts and method",  ("prompts", "method")),
    ("the parts of a step", ("rewards", "packing", "decoding", "learning", "report")),
    ("data",                ("data", "benchmarks")),
    ("config",              ("config", "configs")),
    ("run",                 ("run",)),
    ("rl",                  ("rl",)),
    ("stages",              ("stages",)),
    ("aot and commands",    ("aot", "commands")),
    ("main",                ("main",)),
    ("entry",               ("from_python", "cli")),
)
# What each top-level folder may import of ours.
FOLDERS = {
    "configs":           ("configs",),
    "experiments":       ("configs",),
    "experiments.sweep": ("configs", "experiments", "care_jax.config", "care_jax.devices"),
    "models":            ("models",),
    "care_jax":          ("care_jax", "models"),
}
# fmt: on
# STYLE: jax.jit stands beside what it compiles, in the room that owns the function.
JIT_ROOMS = ("decoding", "rl", "run", "stages")
RANK = {name: rank for rank, (_, names) in enumerate(LAYERS) for name in names}


def modules_of(root: pathlib.Path) -> dict[str, pathlib.Path]:
    """Dotted name of each of our modules to its file; a package's is that of its __init__."""
    return {
        ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__"): path
        for folder in OURS
        for path in sorted((root / folder).rglob("*.py"))
    }


def imports_of(name: str, path: pathlib.Path, modules: dict) -> list[tuple[str, int]]:
    """(imported module, line) of every import in the file, also those inside functions."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: len(package.split(".")) + 1 - node.level]
            parent = ".".join(
                [*base, *filter(None, [node.module])] if node.level else [node.module]
            )
            for alias in node.names:
                inner = f"{parent}.{alias.name}"
                found.append((inner if inner in modules else parent, node.lineno))
    return found


def part_of(name: str) -> str:
    """The row of the table that a module of care_jax stands in: `data` for care_jax.data.mix."""
    return name.split(".")[1]


def unplaced(root: pathlib.Path) -> list[str]:
    return [
        f"{name}: place it in LAYERS of tests/imports_test.py"
        for name in modules_of(root)
        if name.startswith("care_jax.") and part_of(name) not in RANK
    ]


def wrong_imports(root: pathlib.Path) -> list[str]:
    modules, wrong = modules_of(root), []
    for name, path in modules.items():
        top = name.split(".")[0]
        folder = "experiments.sweep" if name.startswith("experiments.sweep") else top
        for target, line in imports_of(name, path, modules):
            where = f"{path.relative_to(root)}:{line} imports {target}"
            target_top, allowed = target.split(".")[0], FOLDERS[folder]
            if target_top in OURS and not f"{target}.".startswith(tuple(f"{x}." for x in allowed)):
                wrong.append(f"{where}; {folder} imports only {' and '.join(allowed)} of ours")
            elif top == target_top == "care_jax" and "." in target and "." in name:
                own, other = RANK.get(part_of(name)), RANK.get(part_of(target))
                if own is not None and other is not None and other > own:
                    wrong.append(f"{where}; {LAYERS[own][0]!r} lies below {LAYERS[other][0]!r}")
    return wrong


def cycles(root: pathlib.Path) -> list[str]:
    modules = modules_of(root)
    graph = {
        name: {t for t, _ in imports_of(name, path, modules) if t in modules and t != name}
        for name, path in modules.items()
    }
    while free := [name for name, targets in graph.items() if not targets & graph.keys()]:
        for name in free:
            del graph[name]
    return sorted(graph)


def torch_imports(root: pathlib.Path) -> list[str]:
    modules = modules_of(root)
    return [
        f"{path.relative_to(root)}:{line} imports {target}; torch is for tests/ and perf/"
        for name, path in modules.items()
        for target, line in imports_of(name, path, modules)
        if target.split(".")[0] in ("torch", "torchvision")
    ]


def is_jit(node: ast.AST) -> bool:
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        return node.attr in ("jit", "pjit", "pmap") and node.value.id in (
            "jax",
            "nnx",
            "nn",
            "pjit",
        )
    is_from_jax = isinstance(node, ast.ImportFrom) and (node.module or "").startswith("jax")
    return is_from_jax and any(alias.name in ("jit", "pjit", "pmap") for alias in node.names)


def stray_jits(root: pathlib.Path) -> list[str]:
    return [
        f"{path.relative_to(root)}:{node.lineno} compiles; only {', '.join(JIT_ROOMS)} do"
        for name, path in modules_of(root).items()
        if part_of(f"{name}.") not in JIT_ROOMS
        for node in ast.walk(ast.parse(path.read_text()))
        if is_jit(node)
    ]


RULES = (unplaced, wrong_imports, cycles, torch_imports, stray_jits)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_program_keeps_the_rule(rule):
    assert modules_of(ROOT), "no module found; the test looks in the wrong folder"
    broken = rule(ROOT)
    assert not broken, "\n" + "\n".join(broken)


PLANTED = (
    (unplaced, "care_jax/new_idea.py", "", "place it in LAYERS"),
    (wrong_imports, "configs/tiny.py", "import care_jax.batch", "configs imports only configs"),
    (wrong_imports, "experiments/arm.py", "from models import rope", "imports only configs"),
    (wrong_imports, "experiments/sweep/a.py", "from care_jax.run import x", "care_jax.config and"),
    (wrong_imports, "models/rope.py", "from care_jax import batch", "models imports only models"),
    (wrong_imports, "care_jax/method/a.py", "from care_jax.stages import x", "below 'stages'"),
    (wrong_imports, "care_jax/method/a.py", "from ..stages import rl", "below 'stages'"),
    (wrong_imports, "care_jax/stages/rl.py", "def f():\n    import care_jax.main", "below 'main'"),
    (wrong_imports, "care_jax/data/mix.py", "from ..config import x", "below 'config'"),
    (cycles, "care_jax/method/spans.py", "import care_jax.method.a", "care_jax.method.s"),
    (torch_imports, "models/rope.py", "def f():\n    from torch.nn import Linear", "torch.nn"),
    (
        stray_jits,
        "care_jax/method/a.py",
        "import jax\n@jax.jit\ndef f(x): return x",
        "a.py:2",
    ),
    (stray_jits, "care_jax/method/a.py", "import jax\nf = jax.vmap(jax.jit)", "a.py:2"),
    (stray_jits, "models/rope.py", "from jax import jit as compile", "rope.py:1"),
)


@pytest.mark.parametrize(("rule", "file", "text", "message"), PLANTED)
def test_a_planted_violation_is_named(rule, file, text, message, tmp_path):
    clean = {
        "care_jax/__init__.py": "",
        "care_jax/batch.py": "",
        "care_jax/data/mix.py": "from .. import batch",
        "care_jax/main.py": "from care_jax.stages import rl",
        "care_jax/decoding/sampler.py": "from models import rope",
        "care_jax/method/a.py": "from care_jax import batch\nfrom care_jax.method import spans",
        "care_jax/method/spans.py": "import jax.numpy as jnp",
        "care_jax/rl/programs.py": "import jax\nfrom care_jax.method import a\nf = jax.jit(a.x)",
        "care_jax/stages/rl.py": "from care_jax.rl.programs import f",
        "configs/tiny.py": "from configs import common",
        "experiments/arm.py": "from configs.tiny import get_config",
        "experiments/sweep/a.py": "from care_jax.config import x\nfrom experiments import arm",
        "models/rope.py": "",
    }
    for name, source in clean.items():
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text(source)
    assert not any(each(tmp_path) for each in RULES)
    (tmp_path / file).write_text(text)
    assert any(message in line for line in rule(tmp_path)), rule(tmp_path)
