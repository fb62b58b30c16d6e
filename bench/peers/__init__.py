"""The usual ways, reimplemented here from their documentation in a few lines each; no code of theirs is copied or fetched."""
