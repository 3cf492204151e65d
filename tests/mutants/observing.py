"""Lists defects in what observers see: curves, processes, lost updates, text that controls the terminal."""

from __future__ import annotations

from tests.mutants.mutation import Mutation

CURVES = "shared/view/curves.py"
VIEW = "tests/unit/shared/view/test_run_view.py"
DRAWN = "tests/unit/launch/terminal/test_drawing.py"

OBSERVING = [
    Mutation(
        "curves keep the steps that were rolled back",
        CURVES,
        "                curve.cut(step)\n",
        "                curve.cut(math.inf)\n",
        f"{VIEW}::test_curves_replace_the_points_that_the_run_rolls_back",
    ),
    Mutation(
        "a silent process is shown as healthy",
        "shared/view/services.py",
        "silent_s > SILENT_S:",
        "silent_s < 0:",
        f"{VIEW}::test_a_process_that_falls_silent_is_shown_as_unhealthy",
    ),
    Mutation(
        "waits hide work",
        "launch/viewers/terminal/panes.py",
        "key=lambda each: not each.waits):",
        "key=lambda each: each.waits):",
        f"{DRAWN}::test_the_lane_of_a_process_shows_work_on_top_of_waits",
    ),
    Mutation(
        "shares divide by seconds whose spans are not known",
        "shared/view/timeline.py",
        "known = max(begin, lane.known_since, self._known_since or begin)",
        "known = begin",
        f"{VIEW}::test_shares_refer_to_the_seconds_whose_spans_are_known",
    ),
    Mutation(
        "the worst of the first samples are shown as the worst of all",
        "shared/samples/selection.py",
        "matching(), key=_KEYS[order])",
        "matching(), key=_KEYS[None])",
        "tests/unit/shared/test_samples_selection.py::test_the_limit_applies_after_the_order",
    ),
    Mutation(
        "escape codes in a sample reach the terminal",
        "launch/viewers/terminal/visible.py",
        "for code in range(0x20) if code != 0x0A}",
        "for code in range(0x1B) if code != 0x0A}",
        f"{DRAWN}::test_control_characters_become_visible_and_line_breaks_are_kept",
    ),
]
