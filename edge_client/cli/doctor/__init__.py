"""`fedcg doctor`: what is wrong with this device and what to do about it."""
