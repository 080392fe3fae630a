"""Simulated instances against one etcd and one NATS: what each costs them, and who comes back when."""
