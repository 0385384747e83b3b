"""One file per federated method; a method is found by its file name."""
