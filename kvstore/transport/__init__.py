"""Blocks between hosts: one interface (`base`), and TCP behind it (`protocol`, `tcp_client`, `tcp_server`)."""
