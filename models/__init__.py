"""Model files, tokenizers, chat templates and the transformer. Only `weights`, `exactness` and `transformer` use torch."""
