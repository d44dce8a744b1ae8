<<<<<<< HEAD
"""Training a causal language model on sequences sharded over ranks: what `burst train` is made of."""
=======
"""Training a long-context language model: `burst train`."""
>>>>>>> 49a0918 (Training leaves a log, a live line and a report: torchtitan's names so that its tools read it, unknown values left out, files whole or absent)
