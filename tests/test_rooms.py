"""House rules, checked on the syntax tree of every file: who may import whom, how long things may be, what is banned."""
import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "qwentin"
FILES = sorted(p for p in PACKAGE.rglob("*.py"))
TREES = {p: ast.parse(p.read_text()) for p in FILES}
NAMES = [str(p.relative_to(PACKAGE)) for p in FILES]

# room: which rooms of the package its files may import. A room is the first folder below qwentin/, or "spine".
ROOMS = {
    "spine": {"spine", "nano", "model", "kernels"},   # narrowed below: only the files of UPWARD may look at a lower room
    "model": {"spine", "model", "kernels"},
    "kernels": {"spine", "kernels"},
    "server": {"spine", "server", "nano"},
    "commands": {"spine", "server", "model", "kernels", "nano", "commands"},     # the top: nobody but __main__ imports it
    "nano": set(),
}
# spine file: the lower rooms it may import. Everything else in the spine imports the spine alone.
UPWARD = {
    "engine.py": {"model"}, "towers.py": {"model"}, "device.py": {"kernels"}, "config.py": {"nano"},
    "__main__.py": {"commands"},
}
KERNEL_IMPORTS = {"numerics", "device", "errors", "config"}     # what kernels/ may take from the spine
SERVER_FORBIDDEN = {"kvpool", "slots", "step", "sampler", "scheduler", "numerics", "device", "tree"}
ONLY_IN = {"numba": ("kernels", "device.py"), "llvmlite": ("kernels",), "aiohttp": ("server",),
           "cuda": ("kernels", "driver.py", "model")}


def room(path):
    parts = path.relative_to(PACKAGE).parts
    return parts[0] if len(parts) > 1 else "spine"


def imports(path):
    """Every module a file imports, absolute, wherever in the file the import stands."""
    package = ("qwentin",) + path.relative_to(PACKAGE).parts[:-1]
    for node in ast.walk(TREES[path]):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[:len(package) - node.level + 1] if node.level else ()
            stem = ".".join(base + tuple((node.module or "").split(".") if node.module else ()))
            yield from (f"{stem}.{alias.name}" for alias in node.names)


def target_room(module):
    """The room of an imported qwentin module, or None for anything else."""
    parts = module.split(".")
    if parts[0] != "qwentin" or len(parts) == 1:
        return None
    return parts[1] if (PACKAGE / parts[1]).is_dir() else "spine"


@pytest.mark.parametrize("name", NAMES)
def test_imports_point_down(name):
    path = PACKAGE / name
    allowed = ROOMS[room(path)]
    if room(path) == "spine":
        allowed = {"spine"} | UPWARD.get(name, set())
    for module in imports(path):
        where = target_room(module)
        assert where is None or where in allowed, f"{name} may not import {module}"
        if where == "spine" and room(path) == "kernels":
            assert module.split(".")[1] in KERNEL_IMPORTS, f"{name} may not import {module}"
        if where == "spine" and room(path) == "server":
            assert module.split(".")[1] not in SERVER_FORBIDDEN, f"{name} may not import {module}"
        top = module.split(".")[0]
        if top in ONLY_IN:
            assert room(path) in ONLY_IN[top] or path.name in ONLY_IN[top], f"{name} may not import {top}"


def function_limit(node, in_kernels):
    """Device functions (any decorator that names cuda, or a builder inside kernels/) may be longer than host ones."""
    return 120 if in_kernels and any("device" in ast.unparse(d) or "kernel" in ast.unparse(d)
                                     for d in node.decorator_list) else 40


def code_lines(node):
    """Lines of a function, its docstring not counted."""
    first = node.body[0]
    doc = first if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) \
        and isinstance(first.value.value, str) else None
    return node.end_lineno - node.lineno + 1 - (doc.end_lineno - doc.lineno + 1 if doc else 0)


def own_lines(node):
    """code_lines less those of the functions defined inside: a builder is not charged for the kernel it builds."""
    inner = [n for n in ast.walk(node) if isinstance(n, ast.FunctionDef) and n is not node]
    outermost = [n for n in inner if not any(n is not m and m.lineno <= n.lineno and n.end_lineno <= m.end_lineno
                                             for m in inner)]
    return code_lines(node) - sum(n.end_lineno - n.lineno + 1 for n in outermost)


@pytest.mark.parametrize("name", NAMES)
def test_sizes(name):
    path = PACKAGE / name
    in_kernels = room(path) == "kernels"
    lines = len(path.read_text().splitlines())
    assert lines <= (400 if in_kernels else 300), f"{name} has {lines} lines"
    for node in ast.walk(TREES[path]):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            limit = function_limit(node, in_kernels)
            assert own_lines(node) <= limit, f"{name}: {node.name} has {own_lines(node)} lines, {limit} allowed"


def is_mutable(node):
    """A list, dict or set display, comprehension or constructor call."""
    if isinstance(node, ast.Call):
        return ast.unparse(node.func).split(".")[-1] in {"list", "dict", "set", "defaultdict", "deque", "OrderedDict"}
    return isinstance(node, (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp))


@pytest.mark.parametrize("name", NAMES)
def test_bans(name):
    path, tree = PACKAGE / name, TREES[PACKAGE / name]
    assert path.stem not in {"utils", "common", "helpers"}, "name the noun instead"
    may_print = path.stem in {"__main__", "lab"} or room(path) == "commands"
    for node in ast.walk(tree):
        text = ast.unparse(node) if isinstance(node, (ast.Attribute, ast.Call)) else ""
        if text in {"os.environ", "os.getenv"}:
            assert name == "config.py", f"{name}:{node.lineno} reads the environment"
        assert not isinstance(node, ast.Global), f"{name}:{getattr(node, 'lineno', 0)} uses a global"
        assert not (isinstance(node, ast.ExceptHandler) and node.type is None), f"{name}:{node.lineno} bare except"
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print":
            assert may_print, f"{name}:{node.lineno} prints"
    for node in tree.body:                            # a module-level table must be named as the constant it is
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None and is_mutable(node.value):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                assert ast.unparse(target).isupper() or ast.unparse(target) == "__all__", \
                    f"{name}:{node.lineno} module-level mutable state: {ast.unparse(target)}"


@pytest.mark.parametrize("name", NAMES)
def test_module_docstring(name):
    assert ast.get_docstring(TREES[PACKAGE / name]), f"{name} does not say what it is for"


def test_import_is_light():
    """`import qwentin` and the numpy side start no CUDA and import no numba; only the server imports aiohttp."""
    import subprocess
    import sys
    code = ("import sys, qwentin, qwentin.config, qwentin.engine, qwentin.model.cpu; "
            "sys.exit(' '.join(m for m in ('numba', 'cuda', 'aiohttp') if m in sys.modules) or 0)")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
