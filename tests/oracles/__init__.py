"""Independent float64 references, written for one sequence at a time and for nothing but clarity."""
