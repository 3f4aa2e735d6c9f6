"""Rules of the layout, checked on every source file: who may import whom, and where hardware may be named."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
KERNELS = ("cpu_kernels", "cuda_kernels", "ascend_kernels")
# Imports go server -> runtime -> device -> kernel packages; the kernel packages never import one another.
MAY_IMPORT = {
    "server": {"server", "runtime", "device"},
    "runtime": {"runtime", "device"},
    "device": {"device", *KERNELS},
    **{package: {package} for package in KERNELS},
}
OURS = set(MAY_IMPORT) | {"tests", "scripts"}
FRAMEWORKS = {"torch", "torch_npu", "mindspore", "triton", "transformers", "tensorflow", "jax"}
MAX_LINES = 600
# Names of SoCs and instruction sets: only device/ and the kernel packages know them.
HARDWARE = re.compile(
    r"\b(ascend_?\d\w*|310p\w*|910[abc]\w*|sm_?\d\d\w*|avx\w*|vnni|neon|amx|sse\d?|sve2?|hopper|ampere|torch\.(cuda|npu))\b",
    re.IGNORECASE,
)
DEVICES = {"ascend", "npu", "cuda", "gpu", "mindspore", "cpu"}


def sources(*rooms: str) -> list[Path]:
    return sorted(path for room in rooms for path in (ROOT / room).rglob("*.py"))


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """(line, absolute module name) of every import, the ones inside functions and under conditions included."""
    package = path.relative_to(ROOT).parent.parts
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            yield node.lineno, ".".join([*above, *([node.module] if node.module else [])])
        elif isinstance(node, ast.Call):
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            first = node.args[0] if node.args else None
            if name in ("import_module", "__import__") and isinstance(first, ast.Constant):
                yield node.lineno, str(first.value)


def where(path: Path, line: int) -> str:
    return f"{path.relative_to(ROOT)}:{line}"


def test_the_rooms_are_there() -> None:
    """The rules below must not pass for want of files."""
    for room in ("server", "runtime", "device"):
        assert sources(room), room


def test_imports_go_one_way() -> None:
    wrong = [
        f"{where(path, line)} imports {module}"
        for room, allowed in MAY_IMPORT.items()
        for path in sources(room)
        for line, module in imports(path)
        if module.split(".")[0] in OURS - allowed
    ]
    assert not wrong, "\n".join(wrong)


def test_no_tensor_framework_above_device() -> None:
    wrong = [
        f"{where(path, line)} imports {module}"
        for path in sources("server", "runtime")
        for line, module in imports(path)
        if module.split(".")[0] in FRAMEWORKS
    ]
    assert not wrong, "\n".join(wrong)


def test_a_framework_is_imported_only_in_the_device_file_named_for_it() -> None:
    wrong = [
        f"{where(path, line)} imports {module}"
        for path in sources("device")
        for line, module in imports(path)
        if module.split(".")[0] in FRAMEWORKS and path.stem not in ("cuda", "ascend", "mindspore", "torch")
    ]
    assert not wrong, "\n".join(wrong)


def code_words(path: Path) -> Iterator[tuple[int, str]]:
    """(line, text) of what the interpreter acts on: names, attributes, strings; no comments and no docstrings."""
    tree = ast.parse(path.read_text(), str(path))
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        line = getattr(node, "lineno", 0)
        if isinstance(node, ast.Name):
            yield line, node.id
        elif isinstance(node, ast.Attribute):
            yield line, node.attr
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield line, node.name
        elif isinstance(node, (ast.arg, ast.keyword)):
            yield line, node.arg or ""
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield line, node.value


def names_hardware(text: str) -> re.Match[str] | None:
    return HARDWARE.search(text) or HARDWARE.search(text.replace("_", " "))


def test_no_hardware_is_named_above_device() -> None:
    wrong = [
        f"{where(path, line)}: {found[0]!r} in {text[:60]!r}"
        for path in sources("server", "runtime")
        for line, text in code_words(path)
        if (found := names_hardware(text))
    ]
    assert not wrong, "\n".join(wrong)


def device_branches(tree: ast.AST) -> Iterator[int]:
    """Lines of comparisons and match cases with a device's name."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.Compare, ast.MatchValue)):
            for part in ast.walk(node):
                if isinstance(part, ast.Constant) and part.value in DEVICES:
                    yield node.lineno


def test_nothing_branches_on_the_device_above_device() -> None:
    """Two places may: device selection and the binding of the op table. Both lie in device/."""
    wrong = [
        where(path, line)
        for path in sources("server", "runtime")
        for line in device_branches(ast.parse(path.read_text(), str(path)))
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    "code", ["if d.kind == 'cuda': pass", "x = k in ('cpu', 'npu')", "match d:\n case 'cpu': pass"]
)
def test_the_rule_sees_branches(code: str) -> None:
    assert list(device_branches(ast.parse(code)))


@pytest.mark.parametrize(
    "text", ["has_avx2", "Ascend910B", "torch.cuda", "x = 'neon'", "soc_310p", "sm_90", "avx512_vnni"]
)
def test_the_rule_sees_hardware_names(text: str) -> None:
    assert names_hardware(text)


@pytest.mark.parametrize("text", ["cancel", "canned", "essence", "cannot", "sample", "input", "assembled", "cpu"])
def test_the_rule_lets_other_words_pass(text: str) -> None:
    assert not names_hardware(text)


def test_files_keep_one_subject() -> None:
    long = [
        f"{path.relative_to(ROOT)}: {lines} lines"
        for path in sources(*MAY_IMPORT)
        if (lines := len(path.read_text().splitlines())) > MAX_LINES
    ]
    assert not long, f"over {MAX_LINES} lines (aim for 500): " + ", ".join(long)


# Slow to import or large, and not needed to start: tokenizer hub client, format tools, test tools, frameworks.
NOT_AT_START = sorted({"gguf", "huggingface_hub", "requests", "jinja2.sandbox", "openai", *FRAMEWORKS})


@pytest.mark.parametrize("module", ["server.cli", "runtime", "device.cpu"])
def test_nothing_slow_is_imported_at_start(module: str) -> None:
    code = f"import sys, {module}; print([m for m in {NOT_AT_START!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"
