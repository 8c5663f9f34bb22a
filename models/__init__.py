"""Model files, tokenizers, chat templates, transformer. Only `weights`, `exactness`, `transformer` use torch."""
