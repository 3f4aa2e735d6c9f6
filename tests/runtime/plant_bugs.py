"""Plants bugs into copies of the runtime and tells which tests notice. Not collected by pytest.

    python tests/runtime/plant_bugs.py                     # all of them (about half an hour on two cores)
    python tests/runtime/plant_bugs.py draft uniform       # those with one of these words in their name
    python tests/runtime/plant_bugs.py --check             # only whether each can still be planted

Each bug is one small change of the sources, made in a copy of the tree in a temporary folder. The unit tests of the
runtime and the property test of schedule independence run against the copy. A bug is killed when any of them fails;
what survives is either equivalent (``SURVIVES`` says why) or shows a test that is missing. The exit status is 1 when a
bug survives that should not, when one dies that is listed as equivalent, or when one can no longer be planted because
the sources have changed: then adapt it here.

The first run is of the tree without a bug: it must pass, or nothing after it means anything.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(Path(__file__).resolve().parent))
from planted_bugs import BUGS, SURVIVES, Bug  # noqa: E402

PROPERTY = "tests/runtime/test_schedule_independence.py"
UNIT = [
    f"tests/runtime/test_{name}.py"
    for name in (
        "blocks", "prefix_hash", "uniforms", "ngram", "edits", "scheduler", "scheduler_batching", "step", "results",
        "engine", "engine_admission", "engine_life", "startup", "offline",
    )
]  # fmt: skip
ROOMS = ("runtime", "device", "cpu_kernels")
# No shrinking: only whether a test fails matters here. And the copy must not import the original.
CONFTEST = """

from pathlib import Path
from hypothesis import Phase, settings
settings.register_profile(
    "plant", parent=settings.get_profile("plain"), phases=(Phase.explicit, Phase.generate), database=None
)
settings.load_profile("plant")
import runtime
assert Path(runtime.__file__).is_relative_to(Path(__file__).resolve().parents[1]), runtime.__file__
"""


def planted(bug: Bug, root: Path) -> None:
    """Change the sources under ``root``; ValueError when a text to be changed is not there exactly as often as said."""
    path = root / "runtime" / bug.file
    text = path.read_text()
    for old, new, times in bug.changes:
        if text.count(old) != times:
            raise ValueError(f"{bug.name}: {bug.file} has {text.count(old)} times, not {times} times: {old!r}")
        text = text.replace(old, new)
    compile(text, str(path), "exec")
    path.write_text(text)


def copy_tree(target: Path) -> None:
    skip = shutil.ignore_patterns("__pycache__", ".hypothesis", "*.pyc")
    for room in ROOMS:
        if (ROOT / room).is_dir():
            shutil.copytree(ROOT / room, target / room, ignore=skip)
    for part in ("runtime", "device", "support", "data"):
        shutil.copytree(ROOT / "tests" / part, target / "tests" / part, ignore=skip)
    shutil.copy(ROOT / "pyproject.toml", target)
    (target / "tests" / "conftest.py").write_text((ROOT / "tests" / "conftest.py").read_text() + CONFTEST)


def failures(root: Path, tests: list[str], cases: int) -> list[str]:
    """Names of the tests that fail, at most three; ["does not end"] when they hang."""
    env = {**os.environ, "PYTHONPATH": str(root), "JUMAR_SCHEDULE_CASES": str(cases), "OMP_NUM_THREADS": "1"}
    command = [
        sys.executable, "-m", "pytest", *tests, "-q", "--maxfail=3", "--tb=no", "--timeout=60",
        "-p", "no:cacheprovider",
    ]  # fmt: skip
    try:
        done = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, timeout=420)
    except subprocess.TimeoutExpired:
        return ["does not end"]
    found = [
        line.split(" - ")[0].removeprefix("FAILED ").removeprefix("ERROR ").removeprefix("tests/runtime/").strip()
        for line in done.stdout.splitlines()
        if line.startswith(("FAILED ", "ERROR "))
    ]
    if done.returncode and not found:
        found = [f"pytest ended with {done.returncode}: {(done.stdout + done.stderr)[-300:]}"]
    return found


def trial(bug: Bug | None, cases: int) -> tuple[list[str], list[str]]:
    """(unit tests that fail, property tests that fail) with this bug planted."""
    with tempfile.TemporaryDirectory(prefix="planted-") as folder:
        root = Path(folder).resolve()
        copy_tree(root)
        if bug is not None:
            planted(bug, root)
        return failures(root, UNIT, cases), failures(root, [PROPERTY], cases)


def check(bugs: list[Bug]) -> Iterator[str]:
    """What can no longer be planted."""
    for bug in bugs:
        with tempfile.TemporaryDirectory(prefix="planted-") as folder:
            root = Path(folder)
            shutil.copytree(ROOT / "runtime", root / "runtime", ignore=shutil.ignore_patterns("__pycache__"))
            try:
                planted(bug, root)
            except (ValueError, SyntaxError) as error:
                yield str(error)


def report(bug: Bug, unit: list[str], prop: list[str]) -> bool:
    """Print one bug's fate; whether it is as expected."""
    killed = bool(unit or prop)
    expected = (bug.name in SURVIVES) != killed
    fate = "killed" if killed else "SURVIVED"
    print(f"{fate:9}{bug.name}  ({bug.file})")
    print(f"         unit:     {', '.join(unit) or '-'}")
    print(f"         property: {', '.join(prop) or '-'}")
    if bug.name in SURVIVES:
        print(f"         listed as equivalent: {SURVIVES[bug.name]}" + ("" if expected else ": BUT IT WAS KILLED"))
    sys.stdout.flush()
    return expected


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("words", nargs="*", help="plant only bugs with one of these words in their name")
    parser.add_argument("--cases", type=int, default=300, help="cases of the property test (default 300)")
    parser.add_argument("--jobs", type=int, default=2, help="bugs tried at the same time (default 2)")
    parser.add_argument("--check", action="store_true", help="only look whether each can be planted")
    options = parser.parse_args()
    bugs = [bug for bug in BUGS if not options.words or any(word in bug.name for word in options.words)]
    problems = list(check(bugs))
    print("\n".join(problems) or f"{len(bugs)} bugs can be planted")
    if problems or options.check:
        return 1 if problems else 0
    start = time.monotonic()
    clean = trial(None, options.cases)
    if any(clean):
        print(f"the tree fails without a bug planted: {clean}")
        return 1
    print(f"without a bug everything passes ({time.monotonic() - start:.0f} s)")
    with ThreadPoolExecutor(options.jobs) as pool:
        fates = list(pool.map(lambda bug: (bug, *trial(bug, options.cases)), bugs))
    expected = [report(*fate) for fate in fates]
    killed = sum(bool(unit or prop) for _, unit, prop in fates)
    by_property = sum(bool(prop) for _, _, prop in fates)
    print(
        f"{killed} of {len(bugs)} killed, {by_property} by the property test, "
        f"{len(bugs) - killed} survived ({sum(bug.name in SURVIVES for bug in bugs)} expected to); "
        f"{time.monotonic() - start:.0f} s"
    )
    return 0 if all(expected) else 1


if __name__ == "__main__":
    sys.exit(main())
