"""The wire protocol of rlbus: encodes and decodes typed messages. No I/O, no torch. `SPEC.md` is authoritative."""
