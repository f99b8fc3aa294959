#!/usr/bin/env python3
"""Run make verbs one after another, stop at the first failure, and close with a table and one count of tests.

    python3 tools/run_checks.py lint test-rust wheel-check test-unit

Output passes through as it comes. The last line is `N passed, N failed, N skipped`, added up over the closing
lines of cargo test, nextest, pytest and check_wheel.py. A `test-` verb that ran no test has failed; any other
verb without a count of its own is one test.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass

ANSI = re.compile(r"\x1b\[[0-9;]*m")
CARGO = re.compile(r"^test result: \w+\. (\d+) passed; (\d+) failed; (\d+) ignored")
NEXTEST = re.compile(r"^\s*Summary \[.*\] +\d+(?:/\d+)? tests? run: (.*)")
# pytest's closing line, with or without its rule; check_wheel.py's has the same words.
PLAIN = re.compile(r"^=*\s*((?:\d+ [a-z]+(?:, )?)+)(?: in [0-9.:]+s?.*)?\s*=*$")
WORDS = {"passed": "passed", "failed": "failed", "error": "failed", "errors": "failed", "skipped": "skipped"}


@dataclass
class Count:
    passed: int = 0
    failed: int = 0
    skipped: int = 0

    def add(self, other: Count) -> None:
        self.passed += other.passed
        self.failed += other.failed
        self.skipped += other.skipped

    def __str__(self) -> str:
        return f"{self.passed} passed, {self.failed} failed, {self.skipped} skipped"


def words(text: str) -> Count:
    """Count of a list such as `12 passed (1 slow), 2 skipped`."""
    count = Count()
    for number, word in re.findall(r"(\d+) ([a-z]+)", text):
        if field := WORDS.get(word):
            setattr(count, field, getattr(count, field) + int(number))
    return count


def read_line(line: str) -> Count:
    """Tests that a runner's closing line reports; zero for any other line."""
    line = ANSI.sub("", line.rstrip())
    if found := CARGO.match(line):
        return Count(*map(int, found.groups()))
    if found := NEXTEST.match(line):
        # nextest calls skipped what a filter expression left out, which is no test of this verb.
        count = words(found[1])
        return Count(count.passed, count.failed)
    if (found := PLAIN.match(line)) and any(
        word in found[1] for word in ("passed", "failed", "skipped", "error")
    ):
        return words(found[1])
    return Count()


def run(verb: str) -> tuple[int, Count]:
    """Run one make verb, echo its output, return (exit code, tests counted)."""
    count = Count()
    process = subprocess.Popen(
        [os.environ.get("MAKE", "make"), "--no-print-directory", verb],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        # The outer make's flags and job server are not for the inner one.
        env={k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL")},
    )
    assert process.stdout is not None
    for line in process.stdout:
        sys.stdout.write(line)
        sys.stdout.flush()
        count.add(read_line(line))
    code = process.wait()
    if not code and verb.startswith("test-") and not (count.passed or count.skipped):
        print(f"{verb}: ran no test", flush=True)
        code = 1
    if code and not count.failed:
        count.failed = 1
    elif not code and not (count.passed or count.skipped):
        count.passed = 1
    return code, count


def main() -> int:
    verbs = sys.argv[1:]
    total = Count()
    rows = []
    code = 0
    for verb in verbs:
        print(f"--- {verb}", flush=True)
        started = time.monotonic()
        code, count = run(verb)
        total.add(count)
        rows.append((verb, "failed" if code else "ok", time.monotonic() - started, count))
        if code:
            break
    print("\n--- summary")
    for verb, state, seconds, count in rows:
        print(f"{verb:<14} {state:<7} {seconds:6.0f} s   {count}")
    for verb in verbs[len(rows) :]:
        print(f"{verb:<14} not run")
    print(total)
    return 1 if code else 0


if __name__ == "__main__":
    sys.exit(main())
