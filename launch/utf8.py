"""Runs the commands in Python's UTF-8 mode, whatever the locale, since all files of a run are UTF-8."""

from __future__ import annotations

import codecs
import locale
import os
import sys
from io import TextIOWrapper


def ensure_utf8() -> None:
    """Start the command again in UTF-8 mode, in this process, if the locale has another encoding.

    Output keeps the encoding of the locale; characters that it lacks are escaped.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper) and codecs.lookup(stream.encoding).name != "utf-8":
            stream.reconfigure(errors="backslashreplace")  # PYTHONIOENCODING may ask for another encoding, strictly
    encoding = locale.getencoding()
    if sys.flags.utf8_mode or codecs.lookup(encoding).name == "utf-8":
        return
    os.environ["PYTHONUTF8"] = "1"
    os.environ.setdefault("PYTHONIOENCODING", f"{encoding}:backslashreplace")
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])  # noqa: S606  # the same command
