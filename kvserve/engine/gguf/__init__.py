"""GGUF files, the format of llama.cpp: tensors, config and tokenizer in one file."""
