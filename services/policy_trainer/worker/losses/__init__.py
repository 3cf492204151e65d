"""The terms of the loss, a family a file. Small pure functions of tensors; none sums, normalises or keeps anything."""
