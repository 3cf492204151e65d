"""The parts of the terminal interface: a picture that is drawn to fit its size, the help, and a question."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.screen import ModalScreen
from textual.widgets import Static

from launch.viewers.terminal.visible import visible_text

HELP = """\
1 … 8, ← →   go to a view               t   light or dark
?            this page                  q   quit; the run continues

Services     r   restart the process    d   drain a rollout or frozen model
             (a run on this machine, or an operator's access file)
Curves       ↓ ↑   next and previous    z   one chart or many
Time         - +   longer and shorter window
Log          /   filter by text         l   minimum level   (a run on this machine)
             w   wrap long lines, or one row for each line
Samples      , .   earlier and later step     o   order     c   colours     e   data set
             /   all samples of one task

docs/monitor.md describes what each view shows.  Esc closes this page."""


class Picture(Static):
    """Lines that are drawn to fit the current size of the widget."""

    def __init__(self, draw: Callable[[int, int], Sequence[Text]], *, id: str) -> None:
        super().__init__("", id=id)
        self._draw = draw
        self._shown: Text | None = None

    def redraw(self, width: int, height: int) -> None:
        """Draw the lines for this size, and repaint the widget only if they have changed."""
        text = visible_text(Text("\n", no_wrap=True, overflow="ellipsis").join(self._draw(width, height)))
        if text != self._shown:
            self._shown = text
            self.update(text)


class Help(ModalScreen[None]):
    """The page that explains the keys."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,question_mark,q", "dismiss", "close")]

    def compose(self) -> ComposeResult:
        yield Static(HELP, id="help", markup=False)


class Confirm(ModalScreen[bool]):
    """Asks for confirmation before something is done to a process."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("y", "answer(True)", "yes"),
        Binding("n,escape", "answer(False)", "no"),
    ]

    def __init__(self, question: str) -> None:
        super().__init__()
        self._question = question

    def compose(self) -> ComposeResult:
        yield Static(f"{self._question}\n\ny: yes    n: no", id="confirm", markup=False)

    def action_answer(self, yes: bool) -> None:
        self.dismiss(yes)
