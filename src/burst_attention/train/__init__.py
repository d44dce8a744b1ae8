"""Training a long-context language model: `burst train`."""
