"""The core: the state, algorithms, passes, the program and its fold."""
