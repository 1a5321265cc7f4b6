"""The demo: the full path from text to a sampled Hugging Face model, using the commands that users type."""
