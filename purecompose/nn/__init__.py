"""Networks: modules as pure functions, keyed randomness inside them, layers and models."""
