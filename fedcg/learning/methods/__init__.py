"""One file per federated method. A method's name is its file name."""
