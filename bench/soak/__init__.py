"""A long run of mixed traffic over a store far too small for it; each text is compared with one made without it."""
