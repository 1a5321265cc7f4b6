"""Whether one model comes from another, and which came from which: AWM, HuRef, and a tree of models."""
