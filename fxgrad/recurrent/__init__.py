"""Recurrent layers and packed sequences: how Dynamo sees them, and the operators they become."""
