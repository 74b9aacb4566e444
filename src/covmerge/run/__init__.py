"""What carries a plan out, and what judges, compares and verifies models."""
