"""Scripts that record the results of other libraries. They run in the environments of those libraries, and no test runs
them."""
