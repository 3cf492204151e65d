"""The wire contract of rlbus: bytes in, typed messages out. No I/O, no torch; `SPEC.md` is the authority."""
