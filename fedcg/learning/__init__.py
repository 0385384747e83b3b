"""The learning core: spec, networks, losses and methods. Independent of sockets, sessions and stores."""
