"""Text and token ids: tokenizer, chat template, incremental detokenizer, stop strings. Pure; knows no HTTP and no tensor."""
