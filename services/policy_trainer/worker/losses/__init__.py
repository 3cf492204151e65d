"""The terms of the loss, one family per file: small pure functions of tensors that neither sum nor normalise."""
