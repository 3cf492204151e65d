"""Shows a live run in a terminal: the picture of `shared.view`, drawn with textual or as plain lines."""
