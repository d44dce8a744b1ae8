"""Training a causal language model on sequences sharded over ranks: what `burst train` is made of."""
