"""The wire protocol of rlbus: encodes and decodes typed messages, without I/O or torch. `SPEC.md` is authoritative."""
