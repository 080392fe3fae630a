"""What an operator may ask of a running instance, over NATS or this machine's private socket."""
