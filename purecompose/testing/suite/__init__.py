"""Laws, by what they are about."""
