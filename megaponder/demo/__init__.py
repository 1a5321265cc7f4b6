"""The demo: the whole way from text to a sampled Hugging Face model, by the commands that users type."""
