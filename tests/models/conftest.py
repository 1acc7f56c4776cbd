"""The parity tables, printed after the tests."""

from __future__ import annotations

from collections import defaultdict

import pytest


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    rows = defaultdict(list)
    for report in terminalreporter.stats.get("passed", []) + terminalreporter.stats.get("failed", []):
        for title, row in getattr(report, "user_properties", []):
            if title.startswith("parity"):
                rows[title].append(row)
    for title, lines in rows.items():
        terminalreporter.section(title)
        for line in lines:
            terminalreporter.write_line(line)
