"""Where the samples are inside a value, and where each op leaves them."""
