"""Blocks between hosts: one interface (`base`), TCP behind it (`tcp_client`, `tcp_server`), NIXL as an extra."""
