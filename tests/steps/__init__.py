"""Steps of random programs, as tables that any generator can draw from."""
