"""Blocks between hosts: one interface (`base`), TCP built in (`tcp_client`, `tcp_server`), NIXL as an extra."""
