"""The study: which method is worth its passes, on one corpus, one tokenizer and one order of text."""
