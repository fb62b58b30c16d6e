"""The usual ways, reimplemented from their documentation in a few lines each; none of their code is copied."""
