"""One module per actor kind: the hops of a request. The policies beside them are pure."""
