"""How many threads take part beside a busy neighbour: the rule of pace.h, on times that are made up, and the team's."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from cpu_kernels.build import HERE, find_compiler

PROGRAM = r"""
#include <stdio.h>
#include "pace.h"
const int64_t MS = 1000000;
// lost: a number for each number of threads (0: none, 1: half of the time of all the others is lost)
struct World {
    Pace pace;
    int64_t clock = 1;
    int step(int all, int free_cores) {
        const int n = pace.threads(clock, all);
        const bool crowded = n > free_cores;
        const int64_t took = crowded ? 10 * MS : 5 * MS;
        clock += took;
        pace.took(clock, n, took, crowded ? took / 2 * (n - 1) : took / 20);
        return n;
    }
};
int main() {
    World w;
    for (int i = 0; i < 100; i++) if (w.step(4, 4) != 4) return puts("quiet: fewer threads"), 1;
    int few = 0, tried = 0;
    for (int i = 0; i < 400; i++) {
        const int n = w.step(4, 3);
        few += n == 3, tried += n == 4;
        if (n < 3) return puts("too few"), 1;
    }
    if (few < 370 || tried < 4) return printf("busy: %d steps of three threads, %d of four\n", few, tried), 1;
    int until = 0;
    while (w.step(4, 4) != 4 && until < 1000) until++;
    if (until > 300) return printf("free again: noticed after %d steps\n", until), 1;
    for (int i = 0; i < 100; i++) if (w.step(4, 4) != 4) return puts("free again: fewer threads"), 1;
    for (int i = 0; i < 400; i++) if (w.step(4, 1) < 1) return puts("none"), 1;
    int one = 0;
    for (int i = 0; i < 100; i++) one += w.step(4, 1) == 1;
    if (one < 90) return printf("three neighbours: %d steps of one thread\n", one), 1;
    World alone;
    for (int i = 0; i < 100; i++) if (alone.step(1, 0) != 1) return puts("one thread: not one"), 1;
    // a slow step now and then is an accident
    World rare;
    for (int i = 0; i < 300; i++) if (rare.step(2, i % 10 < 2 ? 1 : 2) != 2) return puts("accidents: fewer threads"), 1;
    return 0;
}
"""


@pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler")
def test_threads_give_way_to_a_neighbour_and_come_back(tmp_path: Path) -> None:
    source, program = tmp_path / "pace.cpp", tmp_path / "pace"
    source.write_text(PROGRAM, encoding="utf-8")
    compiler = find_compiler()
    assert compiler is not None
    subprocess.run([*compiler, "-std=c++17", f"-I{HERE / 'src'}", str(source), "-o", str(program)], check=True)
    done = subprocess.run([str(program)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
