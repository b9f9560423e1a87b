"""Sample layouts of values, and their inference op by op."""
