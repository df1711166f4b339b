"""From a Thunder trace to a plan: pure functions over frozen records, no CUDA and no state."""
