"""Lists defects in the page for browsers: access to it, and rows that are rolled back."""

from __future__ import annotations

from tests.mutants.mutation import Mutation

GUARD = "services/web/guard.py"
GUARDED = "tests/unit/web/test_guard.py"
HISTORY = "tests/unit/shared/runfiles/test_files.py"

WEB = [
    Mutation(
        "the page answers under any host name",
        GUARD,
        "if not self._is_own_name(host):",
        "if False:",
        f"{GUARDED}::test_names_of_other_hosts_are_refused",
    ),
    Mutation(
        "the page answers requests from other origins",
        GUARD,
        'origin.partition("://")[2] != host',
        "False",
        f"{GUARDED}::test_requests_from_other_origins_are_refused",
    ),
    Mutation(
        "any token opens the page",
        "shared/guest_server.py",
        'return kind.lower() == "bearer" and self.matches(given)',
        'return kind.lower() == "bearer"',
        f"{GUARDED}::test_data_needs_the_token_if_one_is_set",
    ),
    Mutation(
        "rows that were replaced by the same number of others remain in the curves",
        "shared/runfiles/lines.py",
        "return begin >= head.nbytes and os.pread(descriptor, len(self._newest), begin) != self._newest",
        "return False",
        f"{HISTORY}::test_a_file_that_no_longer_has_its_last_read_line_is_read_again",
    ),
    Mutation(
        "files outside the run's samples are read",
        "services/web/samples.py",
        "if split not in reader.splits(run):",
        "if False:",
        "tests/unit/web/test_samples.py::test_a_split_that_names_a_path_outside_the_samples_is_not_read",
    ),
    Mutation(
        "a browser that reads nothing stays connected",
        "services/web/live_parts.py",
        "async with asyncio.timeout(SEND_S):",
        "async with asyncio.timeout(None):",
        "tests/unit/web/test_live_parts.py::test_a_browser_that_reads_nothing_is_disconnected",
    ),
]
