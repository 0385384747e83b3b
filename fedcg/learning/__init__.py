"""The learning core: spec, networks, losses and methods. Knows nothing of sockets, sessions or stores."""
