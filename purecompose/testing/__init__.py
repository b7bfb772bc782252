"""The laws of the library as a product: strategies, laws, and a report on any algorithm."""
